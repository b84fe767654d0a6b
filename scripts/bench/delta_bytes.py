"""How many bytes does a delta update (changed elements only) have in bf16, in full training and with LoRA?

Trains a released model on real rollouts (`recipe=smollm_rl`) and stores every checkpoint. Then it compares
the weights that servers would receive, step by step, in the way that an update does (`weights/deltas.py`).

    python scripts/bench/delta_bytes.py --json OUT [--model smollm2] [--steps 3] [--settings NAME=VALUE ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from harness import bench_parser, load_average, provenance, write_result  # noqa: E402

from rlpipe.config.paths import resolve_model  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.models.checkpoint import read_weights  # noqa: E402
from rlpipe.weights.session import WeightSession  # noqa: E402

ARMS = {"full": (), "LoRA": ("trainer.lora.rank=16", "trainer.lr=3e-4")}


def train(run: Path, steps: int, settings: list[str]) -> None:
    """Run `steps` steps, with a checkpoint after each."""
    command = [sys.executable, "-m", "rlpipe", "run", "+recipe=smollm_rl", f"run.dir={run}"]
    command += [f"run.steps={steps}", "run.save_every=1", f"run.keep_last={steps}", "val.every=0", *settings]
    subprocess.run(command, cwd=ROOT, check=True)


def deltas(run: Path, steps: int, start: Path) -> list[dict[str, Any]]:
    """Return bytes and elements of the delta of each step."""
    config = RolloutConfig(engine="sglang", device="cpu", dtype="bfloat16")
    folders = [start, *(run / "checkpoints" / f"step_{n}" / "hf" for n in range(1, steps + 1))]
    found, held = [], None
    for step, folder in enumerate(folders):
        new = {name: tensor.to(torch.bfloat16) for name, tensor in read_weights(folder).items()}
        if held is not None:
            names = held.keys() & new.keys()
            session = WeightSession(config, SpecConfig(mode=SpecMode.NONE), folder, folder=run)
            delta = session.delta({n: held[n] for n in names}, {n: new[n] for n in names})
            elements = sum(int((held[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in names)
            whole = sum(new[n].nbytes for n in names)
            found.append(
                {
                    "step": step,
                    "elements": elements,
                    "share": elements / sum(new[n].numel() for n in names),
                    "whole_bytes": whole,
                    "delta_bytes": None if delta is None else delta.num_bytes,
                }
            )
        held = new
    return found


def main() -> None:
    """Run both ways of training and write one JSON."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of the runs")
    args = parser.parse_args()
    load, results = load_average(), {}
    for arm, settings in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            train(run, args.steps, [f"model.path={args.model}", *settings, *args.settings])
            results[arm] = deltas(run, args.steps, resolve_model(args.model))
        for row in results[arm]:
            is_full = row["delta_bytes"] is None
            sent = 1.0 if is_full else row["delta_bytes"] / row["whole_bytes"]
            print(f"{arm} step {row['step']}: {row['share']:.3%} of the elements, {sent:.1%} of the bytes")
    write_result(args.json, provenance(args, load) | {"results": results})


if __name__ == "__main__":
    main()
