"""How far is the memory estimate (rlpipe/memory) from the memory that a process takes?

Each case runs in its own process, on the CPU, where trainer and engine run the same code as on a GPU. A tiny
model runs first, so that libraries and their buffers are loaded, then a random model of the case's sizes.
Measured is the peak resident memory of the process, minus its memory before the model was built. A trainer is
measured during its second step, because the first step touches the optimizer's pages. An engine is measured
while its weights are replaced, and while all its rows decode. The operating system records the peak (VmHWM,
reset by clear_refs), so no peak is missed. The allocator returns freed blocks at once
(MALLOC_MMAP_THRESHOLD_), so that resident memory is memory in use. With a GPU the large trainers can be
chosen (`--only large`, `--only long`); there the measure is the peak that torch allocated. MoE cases run with
`--only experts`. With `--model`, two steps of smollm_rl on that checkpoint run in one process, as a user runs
them, including validation and the last checkpoint. Then the measure is the peak resident memory of the
process, including libraries.

    python scripts/bench/memory_estimate.py --json OUT [--only NAME ...] [--model SMOLLM2]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import bench_parser, load_average, provenance, write_result
from omegaconf import OmegaConf

from rlpipe.cli.run import config_of
from rlpipe.config.draft import DraftConfig
from rlpipe.config.run import Config
from rlpipe.config.trainer import TrainerConfig
from rlpipe.models import read_architecture
from rlpipe.preflight.memory_estimate import engine_memory, estimate, trainer_memory

MODEL = {
    "model_type": "mimo",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
}
TINY = MODEL | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_nextn_predict_layers": None,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
LARGE = {
    **{"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "head_dim": 128},
    **{"num_hidden_layers": 28, "num_attention_heads": 12, "max_position_embeddings": 32768},
}
TRAINER: dict[str, Any] = {"micro_batch_tokens": 1024, "threads": 1}
ROLLOUT: dict[str, Any] = {"device": "cpu", "max_running": 16, "max_context": 1024, "max_new_tokens": 8}
CLEAR_REFS = Path("/proc/self/clear_refs")
CASES: dict[str, dict[str, Any]] = {
    "trainer, fp32": {"trainer": TRAINER},
    "trainer, fp32, recompute": {"trainer": TRAINER | {"recompute": "full", "micro_batch_tokens": 2048}},
    "trainer, fp32, selective": {
        "model": {"vocab_size": 1024},
        "trainer": TRAINER | {"recompute": "selective", "micro_batch_tokens": 4096},
    },
    "trainer, bf16": {"trainer": TRAINER | {"precision": "bf16"}},
    "trainer, bf16, recompute, distributed optimizer": {
        "trainer": TRAINER | {"precision": "bf16", "recompute": "full", "distributed_optimizer": True}
    },
    "trainer, fp32, tied head": {"model": {"tie_word_embeddings": True}, "trainer": TRAINER},
    "trainer, fp32, reference": {"trainer": TRAINER, "algo": {"kl_coef": 0.1}},
    "trainer, fp32, adapters": {"trainer": TRAINER | {"lora": {"rank": 16}}},
    "trainer, bf16, adapters, reference": {
        "trainer": TRAINER | {"precision": "bf16", "lora": {"rank": 16}},
        "algo": {"kl_coef": 0.1},
    },
    "trainer, fp32, many tokens": {
        "model": {"vocab_size": 1024},
        "trainer": TRAINER | {"micro_batch_tokens": 2048},
    },
    "experts: trainer fp32": {"model": EXPERTS, "trainer": TRAINER},
    "experts: trainer bf16 recompute": {
        "model": EXPERTS,
        "trainer": TRAINER | {"precision": "bf16", "recompute": "full", "micro_batch_tokens": 2048},
    },
    "large trainer": {
        "model": LARGE,
        "trainer": {"precision": "bf16", "recompute": "full", "micro_batch_tokens": 16384},
    },
    "large and long trainer": {
        "model": LARGE,
        "trainer": {"precision": "bf16", "recompute": "full", "micro_batch_tokens": 32768},
    },
    "engine, float32": {"rollout": ROLLOUT, "spec": {"mode": "none"}},
    "experts: engine float32": {"model": EXPERTS, "rollout": ROLLOUT, "spec": {"mode": "none"}},
    "engine, bfloat16, drafts": {"rollout": ROLLOUT | {"dtype": "bfloat16", "max_running": 32}},
}


def settings(case: dict[str, Any]) -> Config:
    """Return the case's settings as a configuration."""
    sections = {name: values for name, values in case.items() if name != "model"}
    return OmegaConf.to_object(OmegaConf.merge(Config, sections))


def estimated(case: dict[str, Any]) -> int:
    """Return the estimate of a case, in bytes."""
    arch = read_architecture(MODEL | case.get("model", {}))
    if "rollout" in case:
        return engine_memory(arch, settings(case)).total
    return trainer_memory(arch, settings(case), on_gpu=torch.cuda.is_available()).total


def write_model(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with random weights."""
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(config)
    shapes = arch.weight_shapes(mtp=bool(arch.mtp_layers))
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    weights = {n: (0.02 * torch.randn(s) + (len(s) == 1)).to("cpu", dtype) for n, s in shapes.items()}
    save_file(weights, path / "model.safetensors")
    return path


def train(path: Path, config: Config, step: Any) -> None:
    """Make two optimizer steps on a full micro-batch; call `step` before each."""
    from rlpipe.trainer.megatron import MegatronTrainer

    trainer = MegatronTrainer(config.trainer, config.algo, DraftConfig(), model_path=path, total_steps=2)
    batch = full_batch(trainer.hf_config["vocab_size"], config.trainer)
    for _ in range(2):
        step()
        trainer.train_step(batch)
    trainer.close()


def full_batch(vocab: int, trainer: TrainerConfig) -> Any:
    """Make a full packed micro-batch of random tokens for each data parallel rank, in rows of 512."""
    from rlpipe.batching.packing import pack
    from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory

    length, budget = 512, trainer.micro_batch_tokens
    rng, rows = np.random.default_rng(0), []
    for i in range(trainer.dp * budget // length):
        row = Trajectory(trajectory_id=str(i), group_id="g", instance_id="i", reward=1.0, prompt_length=8)
        row.append_context(rng.integers(0, vocab, 8).tolist())
        size = length - 8
        row.append_sampled(
            GenerateResult(
                request_id=str(i),
                output_ids=rng.integers(0, vocab, size).tolist(),
                logprobs=[-4.0] * size,
                entropies=[3.0] * size,
                versions=[0] * size,
                finish_reason=FinishReason.STOP,
                spec=SpecCounts(),
            )
        )
        rows.append(row)
    weights = [np.ones(len(row.token_ids), np.float32) for row in rows]
    return pack(rows, weights, budget, dp_size=trainer.dp)


def generate(path: Path, config: Config, step: Any) -> None:
    """Decode a few tokens in full rows, replace the weights, and decode again; call `step` in between."""
    from rlpipe.models.checkpoint import read_weights
    from rlpipe.rollout.embedded import EmbeddedEngine
    from rlpipe.types import GenerateRequest, SamplingParams

    rollout = config.rollout
    engine = EmbeddedEngine(rollout, config.spec, path)
    rng, longest = np.random.default_rng(0), rollout.max_context - rollout.max_new_tokens

    async def wave(name: str) -> None:
        requests = [
            GenerateRequest(
                request_id=f"{name}{i}",
                prompt_ids=rng.integers(0, 64, longest).tolist(),
                sampling=SamplingParams(max_new_tokens=rollout.max_new_tokens),
            )
            for i in range(rollout.max_running)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    asyncio.run(wave("a"))
    weights = {name: weight.clone() for name, weight in read_weights(path).items()}
    step()
    engine.update_weights(weights, 1)
    del weights
    asyncio.run(wave("b"))
    engine.close()


def status(field: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def measure(case: dict[str, Any]) -> int:
    """Return the peak memory of a case in this process, excluding the memory of libraries."""
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available() and "trainer" in case
    config, play = settings(case), generate if "rollout" in case else train
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_model(Path(folder) / "tiny", TINY)
        model = write_model(Path(folder) / "model", MODEL | case.get("model", {}))
        play(tiny, config, lambda: None)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = status("VmRSS")
        reset = torch.cuda.reset_peak_memory_stats if gpu else partial(CLEAR_REFS.write_text, "5")
        play(model, config, reset)
    return torch.cuda.max_memory_allocated() if gpu else status("VmHWM") - before


def measure_run(model: Path) -> dict[str, Any]:
    """Return the peak memory of a complete inline run, and its estimate, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"model.path={model}", f"run.dir={folder}/run", "run.steps=2", "val.every=2"]
        settings += ["val.instances=4", "trainer.threads=1", "rollout.threads=1"]
        command = ["+recipe=smollm_rl", *settings]
        guess = sum(memory.total * memory.count for memory in estimate(config_of(command)[0]))
        process = subprocess.Popen([sys.executable, "-m", "rlpipe.run", *command], stdout=subprocess.DEVNULL)
        _, code, usage = os.wait4(process.pid, 0)
    if code:
        raise RuntimeError(f"the run failed with status {os.waitstatus_to_exitcode(code)}")
    measured = usage.ru_maxrss * 1024
    return {
        "name": "smollm_rl, inline",
        "measured": measured,
        "estimated": guess,
        "ratio": round(guess / measured, 4),
    }


def main() -> int:
    """Run all cases and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names contain one of these")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a checkpoint of SmolLM2-135M-Instruct: measure a run too")
    given, load = parser.parse_args(), load_average()
    if given.case:
        print(measure(CASES[given.case]))
        return 0
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    rows = []
    for name, case in CASES.items():
        if not any(text in name for text in given.only or ["trainer,", "engine,"]):
            continue
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(
            command, env=os.environ | allocator, stdout=subprocess.PIPE, text=True, check=True
        )
        measured, guess = int(done.stdout.split()[-1]), estimated(case)
        row = {"name": name, "measured": measured, "estimated": guess, "ratio": round(guess / measured, 4)}
        rows.append(row | {"case": case})
        print(json.dumps(row), flush=True)
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print(f"worst: {worst:.1%}")
    runs = [measure_run(given.model)] if given.model else []
    for row in runs:
        print(json.dumps(row), flush=True)
    result = {**provenance(given, load), "model": MODEL, "worst": round(worst, 4), "rows": rows, "runs": runs}
    write_result(given.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
