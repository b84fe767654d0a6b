"""Is every mistake of the table refused before anything starts, how fast, and does the message help?

Runs each row of tests/helpers/mistakes.py as the command that a user types, in its own folder and with its
own HOME. A message helps if it states what is wrong, the value, and the fix, without a traceback. The goal is
that all mistakes are refused with such a message, each in less than 10 s.

    python scripts/bench/mistakes.py --json OUT [--processes 4]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.cli import newcomers_folder  # noqa: E402
from tests.helpers.mistakes import Mistake, mistakes  # noqa: E402


def play(mistake: Mistake) -> dict[str, Any]:
    """Make one mistake; return exit status, seconds, what the message lacks, and whether a folder remains."""
    with newcomers_folder("rlpipe-mistake-") as (folder, env):
        mistake.files(folder)
        before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
        env["PYTHONPATH"] = os.pathsep.join((env["PYTHONPATH"], str(folder)))
        started = time.perf_counter()
        command = [sys.executable, "-m", "rlpipe.run", *mistake.given]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        seconds = time.perf_counter() - started
        left = {path for path in folder.rglob("*") if "__pycache__" not in path.parts} - before
    said = done.stdout + done.stderr
    return {
        "mistake": mistake.name,
        "caught": done.returncode == mistake.status and "Traceback" not in said,
        "seconds": round(seconds, 2),
        "lacks": mistake.lacks(said),
        "left": sorted(str(path.relative_to(folder)) for path in left),
    }


def main() -> None:
    """Make all mistakes, print the table, and write it."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args, load = parser.parse_args(), load_average()
    with ThreadPoolExecutor(args.processes) as threads:
        rows = list(threads.map(play, mistakes()))
    seconds = [row["seconds"] for row in rows]
    result = {
        **provenance(args, load, packages=()),
        "processes": args.processes,
        "mistakes": len(rows),
        "caught": sum(row["caught"] for row in rows),
        "with what, value and remedy": sum(not row["lacks"] for row in rows),
        "left nothing": sum(not row["left"] for row in rows),
        "median seconds": statistics.median(seconds),
        "longest seconds": max(seconds),
        "rows": rows,
    }
    for row in rows:
        marks = ("caught" if row["caught"] else "NOT CAUGHT", f"lacks {row['lacks']}" if row["lacks"] else "")
        print(f"{row['seconds']:6.2f} s  {' '.join(marks):<28} {row['mistake'][:70]}")
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1))
    write_result(args.json, result)


if __name__ == "__main__":
    main()
