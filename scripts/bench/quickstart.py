"""How long does `scripts/quickstart` take in a fresh clone with an empty HOME, installation included?

The committed state is cloned into a temporary directory, and the script is run there as a newcomer would.
The seconds of each part are those that the script prints. The goal is 720 seconds on two cores, or 900 for
the released model (--real, which runs `scripts/quickstart --real`).

    python scripts/bench/quickstart.py --json OUT [--real] [key=value ...]
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
# Variables that a newcomer's shell does not have.
DEVELOPERS = ("RLPIPE_", "PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
GOALS = {"swe_rl": 720, "smollm_rl": 900}  # seconds


def quickstart(arguments: list[str], clone: Path, home: Path) -> tuple[float, str]:
    """Run the quickstart in a clone; return its seconds and what it printed."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(DEVELOPERS)}
    env |= {"HOME": str(home)}
    script = ["scripts/quickstart", *arguments, f"run.dir={clone / 'run'}"]
    began = time.monotonic()
    done = subprocess.run(
        script, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"scripts/quickstart ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds, done.stdout


def parts(output: str, total: float) -> dict[str, float]:
    """Return the seconds of each part, from the lines that say when it began.

    >>> parts("[   0s] making an environment\\n[  61s] checking this machine\\n[  63s] starting swe_rl", 400)
    {'installation': 61, 'checks': 2, 'fetching the model': 0, 'the run': 337}
    """
    began = {text: int(second) for second, text in re.findall(r"^\[ *(\d+)s\] (\w+)", output, re.MULTILINE)}
    checked, starts = began["checking"], began["starting"]
    fetched = began.get("fetching", starts)
    return {
        "installation": checked,
        "checks": fetched - checked,
        "fetching the model": starts - fetched,
        "the run": round(total - starts),
    }


def held_out(run: Path) -> dict[str, list[list[float]]]:
    """Return reward and standard error before and after, by held-out set; the first set is named ""."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [record for record in records if "val/reward" in record]
    names = [m[1] for name in measured[0] if (m := re.fullmatch(r"val/(?:(\w+)/)?reward", name))]
    prefixes = {name or "": f"val/{name}/" if name else "val/" for name in names}
    return {
        name: [
            [record[f"{prefix}reward"], record[f"{prefix}reward_se"]]
            for record in (measured[0], measured[-1])
        ]
        for name, prefix in prefixes.items()
    }


def main() -> None:
    """Clone, run, and write the result."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--real", action="store_true", help="a released model instead of the shipped one")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    recipe = "smollm_rl" if args.real else "swe_rl"
    arguments = ["--real", *args.overrides] if args.real else args.overrides
    before = load_average()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        home.mkdir()
        seconds, output = quickstart(arguments, clone := Path(directory) / "rlpipe", home)
        report: dict[str, Any] = {
            "question": "seconds of scripts/quickstart in a fresh clone with an empty HOME",
            **provenance(args, before, packages=()),
            "recipe": recipe,
            "goal": GOALS[recipe],
            "seconds": round(seconds, 1),
            "parts": parts(output, seconds),
            "held_out": held_out(clone / "run"),
        }
    write_result(args.json, report)
    print(output[-600:], json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
