"""How long does `scripts/quickstart` take in a fresh clone with an empty HOME, installation included?

The committed state is cloned into a temporary directory, and the script is run there as a newcomer would.
The goal is 720 seconds on two cores.

    python scripts/bench/quickstart.py --json OUT [key=value ...]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
MINE = ("RLPIPE_", "PYTHONPATH", "VIRTUAL_ENV")  # what a newcomer's shell does not have


def play(overrides: list[str], clone: Path, home: Path) -> tuple[float, str]:
    """Seconds and output of the quickstart in a clone."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith(MINE)} | {"HOME": str(home)}
    script = ["scripts/quickstart", f"run.dir={clone / 'run'}", *overrides]
    began = time.monotonic()
    done = subprocess.run(
        script, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"scripts/quickstart ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds, done.stdout


def held_out(run: Path) -> list[float]:
    """Held-out reward of each validation, the first and the last."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["val/reward"] for record in records if "val/reward" in record]
    return [rewards[0], rewards[-1]] if rewards else []


def main() -> None:
    """Clone, run, and write the result."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    before = load_average()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        home.mkdir()
        seconds, output = play(args.overrides, clone := Path(directory) / "rlpipe", home)
        installed = re.search(r"\[ *(\d+)s\] installed", output)
        report: dict[str, Any] = {
            "question": "seconds of scripts/quickstart in a fresh clone with an empty HOME (goal: 720)",
            **provenance(args, before, packages=()),
            "seconds": round(seconds, 1),
            "installation_s": int(installed[1]) if installed else None,
            "val_reward": held_out(clone / "run"),
        }
    write_result(args.json, report)
    print(output[-600:], json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
