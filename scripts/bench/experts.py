"""What does a training step of an MoE cost on a CPU, its experts computed together or module after module?

A random Qwen3-MoE checkpoint, four layers of 64 experts of which a token reads two; forward, recomputation,
backward and optimizer step of one batch, by one thread. Both arms train the same trainer.

`grouped`  rlpipe.trainer.grouped: two products for each expert, in one autograd function for all
`loop`     Megatron's SequentialMLP: a module for each expert

CPU seconds of the process, so that a busy machine disturbs little.

    python scripts/bench/experts.py --json OUT [--experts 64] [--layers 4] [--repeats 5]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from harness import bench_parser, load_average, provenance, table, take_turns, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402

from rlpipe.config.algo import AlgoConfig  # noqa: E402
from rlpipe.config.trainer import Recompute, TrainerConfig  # noqa: E402
from rlpipe.trainer.grouped import GroupedExperts  # noqa: E402
from tests.helpers.tiny_checkpoint import write_random_checkpoint  # noqa: E402
from tests.helpers.trainers import make_batch, make_trainer  # noqa: E402
from tests.helpers.trajectories import make_groups  # noqa: E402


def main() -> None:
    """Time both arms and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    args, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        path = write_random_checkpoint(
            Path(folder) / "moe",
            "qwen3_moe",
            experts=args.experts,
            layers=args.layers,
            hidden=128,
            expert_intermediate=64,
        )
        config = TrainerConfig(lr=1e-6, recompute=Recompute.FULL, micro_batch_tokens=4096)
        trainer = make_trainer(path, config, total_steps=1000)
        groups = [group for seed in range(8) for group in make_groups(seed, common=9)]
        batch = make_batch(groups, AlgoConfig(), budget=4096)
        tokens = sum(len(micro.tokens) for micro in batch.minibatches[0].shards[0])
        grouped = GroupedExperts.forward

        def step(forward) -> None:
            GroupedExperts.forward = forward
            trainer.train_step(batch)

        arms = {"grouped": lambda: step(grouped), "loop": lambda: step(SequentialMLP.forward)}
        samples = take_turns(arms, args.repeats, clock=time.process_time)
        trainer.close()

    results = {name: {"cpu_s": median(seconds)} for name, seconds in samples.seconds.items()}
    pairs = zip(samples.seconds["loop"], samples.seconds["grouped"], strict=True)
    report = {
        **provenance(args, load, device="cpu"),
        "tokens": tokens,
        "results": results,
        "speed": median(loop / together for loop, together in pairs),
    }
    print(table({name: {"cpu_s": round(row["cpu_s"], 3)} for name, row in results.items()}))
    write_result(args.json, report)


if __name__ == "__main__":
    main()
