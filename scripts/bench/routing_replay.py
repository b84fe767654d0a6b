"""How much closer is the trainer to the rollout if tokens go to the experts that the rollout chose?

The shipped MoE samples turns of the shipped tasks, from conversations of a careful demonstrator, with drafts.
A trainer with the same weights then scores the same tokens with and without the recorded experts. Rollout and
trainer differ only in rounding; an arm is a pair of their data types. Reported per seed: mean |p_rollout -
p_trainer| over the sampled tokens, KL(rollout || trainer) by its k3 estimate, and the share of tokens (over
layers) for which the trainer would have chosen other experts.

    python scripts/bench/routing_replay.py --json OUT [--seeds 5] [--instances 24] [--model PATH]
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import bench_parser, load_average, provenance, write_result
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.tiny_model.demonstrators import Demonstrator, demonstrate
from rlpipe.batching.packing import PackedBatch, pack
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig
from rlpipe.config.paths import resolve, shipped
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.config.trainer import Precision, TrainerConfig
from rlpipe.metrics.values import reduce
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.trainer.megatron import MegatronTrainer
from rlpipe.trainer.passes import schedule
from rlpipe.types import GenerateRequest, SamplingParams, Trajectory

ARMS = {  # type of the rollout, precision of the trainer
    "bfloat16 and fp32": ("bfloat16", Precision.FP32),
    "bfloat16 and bf16": ("bfloat16", Precision.BF16),
    "float32 and fp32": ("float32", Precision.FP32),
}


def prompts(model: Path, seed: int, instances: int) -> list[list[int]]:
    """Return the token ids of conversations up to each turn of a careful demonstrator."""
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model)
    lines = shipped("data/swe/train.jsonl").read_text().splitlines()
    found = []
    for line in rng.sample(lines, instances):
        chat = demonstrate(rng, json.loads(line), Demonstrator.CAREFUL)
        for turn in range(1, len(chat), 2):
            text = tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True, tokenize=False)
            found.append(tokenizer(text, add_special_tokens=False).input_ids)
    return found


def sample(model: Path, dtype: str, seed: int, opened: list[list[int]], stop: int) -> list[Trajectory]:
    """Sample one turn from each prompt, and record the experts of every token."""
    config = RolloutConfig(device="cpu", dtype=dtype, replay_routes=True)
    engine = EmbeddedEngine(config, SpecConfig(), model)
    sampling = {"max_new_tokens": 48, "stop_token_ids": (stop,), "routes": True}

    async def play() -> list[Any]:
        requests = (
            GenerateRequest(
                request_id=str(i),
                prompt_ids=ids,
                sampling=SamplingParams(seed=seed * 100_000 + i, **sampling),
            )
            for i, ids in enumerate(opened)
        )
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    try:
        results = asyncio.run(play())
    finally:
        engine.close()
    trajectories = []
    for number, (ids, result) in enumerate(zip(opened, results, strict=True)):
        row = Trajectory(trajectory_id=str(number), group_id="g", instance_id="i", reward=0.0)
        row.append_context(ids)
        row.append_sampled(result)
        trajectories.append(row)
    return trajectories


def differences(trainer: MegatronTrainer, trajectories: list[Trajectory], replay: bool) -> dict[str, float]:
    """Score the trajectories once, and return the figures."""
    batch = pack(trajectories, None, 4096, routes=replay)
    rows = zip(trainer.logprobs(batch), trajectories, strict=True)
    pairs = [(line[i], t.rollout_logprobs[i]) for line, t in rows for i in np.flatnonzero(t.loss_mask)]
    theirs, ours = np.array(pairs, np.float64).T
    ratio = theirs - ours
    figures = {
        "probs_diff_mean": float(np.abs(np.exp(ours) - np.exp(theirs)).mean()),
        "probs_diff_max": float(np.abs(np.exp(ours) - np.exp(theirs)).max()),
        "k3_kl": float((np.exp(ratio) - 1 - ratio).mean()),
        "tokens": len(pairs),
    }
    return figures | ({"flipped": flipped(trainer, batch)} if replay else {})


def flipped(trainer: MegatronTrainer, batch: PackedBatch) -> float:
    """Return `routes/flipped` of a batch."""
    passes, parts = trainer._passes, []

    def count(index: int, micro: Any, found: Any) -> Any:
        parts.append(found.replayed())
        return found.logprobs.sum(), None

    shard = [micro for minibatch in batch.minibatches for micro in minibatch.shards[0]]
    with torch.no_grad():
        schedule(
            trainer.model, shard, passes.forward(trainer.model, count, temperature=1.0), forward_only=True
        )
    return reduce(parts)["routes/flipped"].value()


def main() -> None:
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--instances", type=int, default=24)
    parser.add_argument("--model", default="shipped:models/tiny_moe")
    args, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)
    model = resolve(args.model)
    stop = AutoTokenizer.from_pretrained(model).eos_token_id
    result: dict[str, Any] = {"model": args.model, "instances": args.instances, "arms": {}}
    for name, (dtype, precision) in ARMS.items():
        config = TrainerConfig(precision=precision)
        trainer = MegatronTrainer(config, AlgoConfig(), DraftConfig(), model_path=str(model), total_steps=1)
        seeds = []
        for seed in range(args.seeds):
            opened = prompts(model, seed, args.instances)
            played = sample(model, dtype, seed, opened, stop)
            seeds.append(
                {
                    "without": differences(trainer, played, replay=False),
                    "with": differences(trainer, played, replay=True),
                }
            )
        trainer.close()
        pick = {how: [seed[how] for seed in seeds] for how in ("without", "with")}
        arm: dict[str, Any] = {"seeds": seeds}
        for metric in ("probs_diff_mean", "k3_kl"):
            means = {how: statistics.fmean(s[metric] for s in rows) for how, rows in pick.items()}
            arm[metric] = means | {"with / without": means["with"] / means["without"]}
        arm["flipped"] = statistics.fmean(s["flipped"] for s in pick["with"])
        result["arms"][name] = arm
        print(name, json.dumps({k: v for k, v in arm.items() if k != "seeds"}), flush=True)
    write_result(args.json, provenance(args, load) | result)


if __name__ == "__main__":
    main()
