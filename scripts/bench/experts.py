"""What does a training step of an MoE cost if its experts are computed together, or one after another?

The model is a random Qwen3-MoE checkpoint: four layers of 64 experts; each token is routed to two of them.
Timed are forward, recomputation, backward and optimizer step of one micro-batch. Both arms use the same
trainer.

`grouped`  rlpipe.trainer.grouped: two products for each expert, in one autograd function for all
`loop`     Megatron's SequentialMLP: a module for each expert

On a CPU: one thread, in CPU seconds of the process, so that other load on the machine matters little. With
--device cuda: in bf16, in seconds until the GPU is done.

    python scripts/bench/experts.py --json OUT [--experts 64] [--layers 4] [--repeats 5]
    python scripts/bench/experts.py --json OUT --device cuda --hidden 2048 --inner 768 --experts 128 \
        --per-token 8 --layers 2 --tokens 16384
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import Samples, bench_parser, load_average, provenance, table, take_turns, write_result
from memory_estimate import full_batch, write_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402

from rlpipe.config.trainer import Precision, Recompute, TrainerConfig  # noqa: E402
from rlpipe.trainer.grouped import GroupedExperts  # noqa: E402
from tests.helpers.trainers import make_trainer  # noqa: E402


def finished() -> float:
    """Wait until the GPU has finished; return the time in seconds."""
    torch.cuda.synchronize()
    return time.perf_counter()


def summary(samples: Samples, tokens: int, *, unit: str) -> dict[str, Any]:
    """Return each arm's median and tokens a second, and the speed of `grouped` relative to `loop`."""
    medians = {name: median(seconds) for name, seconds in samples.seconds.items()}
    results = {name: {unit: took, "tokens_per_s": tokens / took} for name, took in medians.items()}
    return {"tokens": tokens, "results": results, "speed": samples.ratio("loop", "grouped")}


def main() -> None:
    """Time both arms and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--inner", type=int, default=64, help="channels of an expert")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of the micro-batch")
    args, load = parser.parse_args(), load_average()
    on_gpu = args.device == "cuda"
    torch.set_num_threads(1)
    hf_config = {
        **{"model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": args.hidden, "head_dim": 64},
        **{"num_hidden_layers": args.layers, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"intermediate_size": 4 * args.inner, "moe_intermediate_size": args.inner, "norm_topk_prob": True},
        **{"num_experts": args.experts, "num_experts_per_tok": args.per_token},
        "max_position_embeddings": 4096,
    }

    with tempfile.TemporaryDirectory() as folder:
        with torch.device(args.device):
            path = write_model(Path(folder) / "moe", hf_config)
        config = TrainerConfig(
            lr=1e-6,
            recompute=Recompute.FULL,
            micro_batch_tokens=args.tokens,
            precision=Precision.BF16 if on_gpu else Precision.FP32,
        )
        trainer = make_trainer(path, config, total_steps=1000)
        batch = full_batch(hf_config["vocab_size"], config)
        grouped = GroupedExperts.forward

        def step(forward) -> None:
            GroupedExperts.forward = forward
            trainer.train_step(batch)

        arms = {"grouped": lambda: step(grouped), "loop": lambda: step(SequentialMLP.forward)}
        samples = take_turns(arms, args.repeats, clock=finished if on_gpu else time.process_time)
        trainer.close()

    found = summary(samples, args.tokens, unit="s" if on_gpu else "cpu_s")
    report = provenance(args, load, device=args.device) | found
    print(table({name: {k: round(v, 3) for k, v in row.items()} for name, row in found["results"].items()}))
    write_result(args.json, report)


if __name__ == "__main__":
    main()
