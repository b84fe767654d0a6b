"""How much memory do saving and resuming a trainer take, and does a resumed trainer continue unchanged?

    python scripts/bench/checkpoint_peaks.py --json OUT [--only NAME ...] [--device cuda] [--model DIR]

Each case trains one step of a random model with the distributed optimizer, with every rank in its own process
(gloo on CPUs). It saves as a run does: the trainer's state and Hugging Face's format, copied first, then
written. It trains one more step, then resumes in new processes and trains that step again. Reported per rank:

`save`    maximum of bytes that saving added to the rank's memory after the step, until everything was written
`resume`  maximum of bytes that loading added to a trainer that was just built
`card`    with --device cuda, on one rank: maximum of bytes that saving added on the GPU

Resident memory equals the memory in use, because MALLOC_MMAP_THRESHOLD_ makes the allocator return freed
blocks; the kernel records its maximum (VmHWM). `estimated` is the estimate of rlpipe/preflight. `norm_error`
is the relative difference of the gradient's norm in the step after resuming.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import bench_parser, load_average, provenance, table, write_result
from memory_estimate import CLEAR_REFS, EXPERTS, MODEL, full_batch, settings, status, write_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.config.run import Config  # noqa: E402
from rlpipe.config.trainer import Precision, TrainerConfig  # noqa: E402
from rlpipe.models import read_architecture  # noqa: E402
from rlpipe.models.checkpoint import read_config  # noqa: E402
from rlpipe.preflight.memory_estimate import checkpoint_memory  # noqa: E402
from tests.helpers.parallel import run_ranks  # noqa: E402
from tests.helpers.trainers import make_trainer, meet  # noqa: E402

BASE = {
    **{"lr": 1e-4, "precision": "bf16", "distributed_optimizer": True},
    **{"micro_batch_tokens": 512, "threads": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "one rank": {"model": {}, "trainer": BASE},
    "one rank, float32": {"model": {}, "trainer": BASE | {"precision": "fp32"}},
    "data parallel": {"model": {}, "trainer": BASE | {"dp": 2}},
    "tensor parallel": {"model": {}, "trainer": BASE | {"tp": 2}},
    "pipeline stages": {"model": {}, "trainer": BASE | {"pp": 2}},
    "experts shared": {"model": EXPERTS, "trainer": BASE | {"dp": 2, "ep": 2}},
}
LARGE = {"trainer": BASE | {"micro_batch_tokens": 16384, "recompute": "full"}}  # --model, on a GPU


def peaks(rank: int, world: int, folder: Path, path: Path, config: TrainerConfig) -> dict[str, float]:
    """Train, save and continue; on a second call, resume and continue. Returns this rank's figures."""
    torch.set_num_threads(1)
    saved = folder / "saved"
    resumes = (saved / "trainer").exists()
    master = meet(rank, world, folder / f"address{resumes}") if world > 1 else None
    trainer = make_trainer(path, config, rank=rank, world_size=world, master=master)
    batch = full_batch(trainer.hf_config["vocab_size"], config)
    on_gpu, found = torch.cuda.is_available(), {}
    if not resumes:
        trainer.train_step(batch)

    # Return to the system what training freed, so that only memory in use counts.
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, started = status("VmRSS"), time.perf_counter()
    CLEAR_REFS.write_text("5")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()

    if resumes:
        trainer.load(saved / "trainer")
        found["resume"] = status("VmHWM") - before
    else:
        parts = trainer.begin_save(saved / "trainer", saved / "hf")
        found["stall_s"] = time.perf_counter() - started
        for part in parts:
            part.write()
        dist.barrier()
        found["save"] = status("VmHWM") - before
        for part in parts:
            part.finish()
        del parts
    found["seconds"] = time.perf_counter() - started
    if on_gpu:
        found["card"] = torch.cuda.max_memory_allocated() - held

    metrics = trainer.train_step(batch)
    found["norm"] = metrics["actor/grad_norm"].value()
    trainer.close()
    return found


def summary(
    saving: list[dict[str, float]], resuming: list[dict[str, float]], estimated: int
) -> dict[str, Any]:
    """Return a case's row from the figures of every rank."""
    most = max(one["save"] for one in saving)
    return {
        "save": most,
        "save_of_ranks": [one["save"] for one in saving],
        "estimated": estimated,
        "ratio": round(estimated / most, 4),
        "resume": max(one["resume"] for one in resuming),
        "card": max((one["card"] for one in saving if "card" in one), default=None),
        "stall_s": round(max(one["stall_s"] for one in saving), 2),
        "save_s": round(max(one["seconds"] for one in saving), 2),
        "resume_s": round(max(one["seconds"] for one in resuming), 2),
        "norm_error": abs(resuming[0]["norm"] / saving[0]["norm"] - 1),
    }


def measure(name: str, case: dict[str, Any], folder: Path, model: Path | None = None) -> dict[str, Any]:
    """Run one case, on its random model or a given one, and return its row."""
    config: TrainerConfig = settings(case).trainer
    if model is None:
        # Store the type that is trained, as released models do: another would need one more copy.
        dtype = torch.bfloat16 if config.precision is Precision.BF16 else torch.float32
        model = write_model(folder / name, MODEL | case["model"], dtype)
    guess = checkpoint_memory(read_architecture(read_config(model)), Config(trainer=config))

    with tempfile.TemporaryDirectory() as own:
        play = (peaks, config.world_size, Path(own), model, config)
        saving = run_ranks(*play)
        resuming = run_ranks(*play)
    return {"name": name} | summary(saving, resuming, guess.total) | {"case": case}


def main() -> int:
    """Run all cases and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names contain one of these")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="named in the result")
    parser.add_argument("--model", type=Path, help="a checkpoint: one rank of this model, and no other case")
    given, load = parser.parse_args(), load_average()
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    rows = []
    chosen = {name: case for name, case in CASES.items() if any(t in name for t in given.only or [""])}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in {given.model.name: LARGE}.items() if given.model else chosen.items():
            rows.append(measure(name, case, Path(folder), given.model))
            print(json.dumps(rows[-1]), flush=True)
            worst = max(abs(row["ratio"] - 1) for row in rows)
            report = provenance(given, load, device=given.device) | {"worst": worst, "rows": rows}
            write_result(given.json, report)
    mib = {row["name"]: {k: row[k] >> 20 for k in ("save", "estimated", "resume")} for row in rows}
    print(table(mib))
    return 0


if __name__ == "__main__":
    sys.exit(main())
