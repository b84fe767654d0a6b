"""How much memory does a trainer's rank take when context parallel ranks share one long conversation?

Each arm is one optimizer step on a single trajectory of `--tokens`, on 1, 2 and 4 ranks over gloo, each a
process with one thread. Measured is the peak resident memory of a rank during its second step (VmHWM), minus
its memory before that step: weights, gradients and optimizer, which every rank has in full. Seconds are those
of the second step on CPUs that the ranks share, so they show no speed-up if there are more ranks than cores.

    python scripts/bench/context_parallel.py --json OUT [--tokens 32768] [--ranks 1 2 4] [--delta]

With --delta three of the four layers are gated delta nets, whose ranks exchange tokens for heads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import bench_parser, load_average, provenance, write_result

sys.path.insert(0, str(Path(__file__).parent))

from memory_estimate import CLEAR_REFS, status, write_model

from rlpipe.batching.packing import pack
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.trainer.megatron import MegatronTrainer
from rlpipe.trainer.runtime import open_address
from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 131072,
}

DELTA = MODEL | {
    "model_type": "qwen3_5_text",
    "intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def conversation(tokens: int) -> Trajectory:
    """Make a prompt of half the tokens and an answer of the same length."""
    rng, half = np.random.default_rng(0), tokens // 2
    row = Trajectory(trajectory_id="0", group_id="g", instance_id="i", reward=1.0, prompt_length=half)
    row.append_context(rng.integers(0, MODEL["vocab_size"], half).tolist())
    row.append_sampled(
        GenerateResult(
            request_id="0",
            output_ids=rng.integers(0, MODEL["vocab_size"], half).tolist(),
            logprobs=[-6.0] * half,
            entropies=[6.0] * half,
            versions=[0] * half,
            finish_reason=FinishReason.STOP,
            spec=SpecCounts(),
        )
    )
    return row


def step(folder: Path, rank: int, ranks: int, tokens: int) -> dict[str, Any]:
    """Return memory and time of one rank in its second step."""
    torch.set_num_threads(1)
    master, meeting = None, folder / f"address{ranks}"
    if ranks > 1 and rank == 0:
        master = open_address(world_size=ranks)
        meeting.with_suffix(".new").write_text(master)
        meeting.with_suffix(".new").rename(meeting)
    elif ranks > 1:
        while not meeting.exists():
            time.sleep(0.05)
        master = meeting.read_text()
    config = TrainerConfig(cp=ranks, micro_batch_tokens=tokens)
    trainer = MegatronTrainer(
        *(config, AlgoConfig(), DraftConfig()),
        model_path=folder / "model",
        **{"rank": rank, "world_size": ranks, "master": master, "total_steps": 2},
    )
    row = conversation(tokens)
    batch = pack([row], [np.ones(len(row.token_ids), np.float32)], tokens)
    trainer.train_step(batch)
    CLEAR_REFS.write_text("5")
    before, started = status("VmRSS"), time.perf_counter()
    found = trainer.train_step(batch)
    seconds = time.perf_counter() - started
    trainer.close()
    return {
        "rank": rank,
        "peak_mb": round((status("VmHWM") - before) / 1e6, 1),
        "seconds": round(seconds, 1),
        "grad_norm": found["actor/grad_norm"].value(),
    }


def main() -> int:
    """Run all arms and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--delta", action="store_true", help="three of four layers are gated delta nets")
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given, load = parser.parse_args(), load_average()
    if given.rank:
        print(json.dumps(step(given.folder, *given.rank, given.tokens)))
        return 0
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    arms, model = [], DELTA if given.delta else MODEL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", model)
        for ranks in given.ranks:
            common = [sys.executable, __file__, "--folder", name, "--tokens", str(given.tokens), "--rank"]
            started = [
                subprocess.Popen(
                    [*common, str(rank), str(ranks)],
                    env=os.environ | settings,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(ranks)
            ]
            found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
            arms.append({"cp": ranks, "peak_mb": max(one["peak_mb"] for one in found), "ranks": found})
            print(json.dumps(arms[-1]), flush=True)
    about = provenance(given, load)
    write_result(given.json, {**about, "model": model, "tokens": given.tokens, "arms": arms})
    return 0


if __name__ == "__main__":
    sys.exit(main())
