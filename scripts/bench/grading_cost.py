"""What does it cost to grade out of reach of the model's code, compared with an earlier commit's grading?

Each arm is a separate process that runs one checkout: this one, and `--baseline` in a temporary git worktree.
Both run episodes on the same repaired instances without a cache of results, in turns and in random order. In
an episode the agent looks for the function, shows its file, repairs the line, runs the tests and submits;
grading is its last step. Reported are wall-clock seconds and CPU seconds (of the process and its children).
Goal: at most 1.3 times an episode of the baseline.

    python scripts/bench/grading_cost.py --json OUT [--baseline 8f2a9b6] [--instances 60]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import bench_parser, git, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("grading wall", "grading cpu", "episode wall", "episode cpu")


def work() -> None:
    """Run an arm: for each instance named on stdin, run it and print its four figures."""
    from rlpipe.config.env import EnvConfig, SandboxConfig
    from rlpipe.envs.swe.suite import SweSuite

    suite = SweSuite(EnvConfig(sandbox=SandboxConfig(memo=False)))
    for line in sys.stdin:
        name = line.strip()
        metadata = suite._instances[name].metadata
        repair = f"sed -i '{metadata['line']}c\\{metadata['fixed_line']}' {metadata['file']}"
        episode, times = suite.episode(name), [spent()]
        for command in (
            "grep -l 'def ' *.py",
            f"grep -n '' {metadata['file']}",
            repair,
            "python3 -m unittest 2>&1 | tail -1",
        ):
            episode.step(command)
        times.append(spent())
        end = episode.step("submit")
        times.append(spent())
        assert end.reward == 1.0, (name, end)
        spans = [[b - a for a, b in zip(times[i], times[2], strict=True)] for i in (1, 0)]
        print("figures", json.dumps([*spans[0], *spans[1]]), flush=True)


def spent() -> tuple[float, float]:
    """Return wall-clock seconds, and CPU seconds of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)


def played(arm: subprocess.Popen[str], name: str) -> list[float]:
    """Return the figures of one instance in one arm."""
    arm.stdin.write(f"{name}\n")
    arm.stdin.flush()
    while not (line := arm.stdout.readline()).startswith("figures"):
        if not line:
            raise SystemExit(f"an arm ended with status {arm.wait()}")
    return json.loads(line.removeprefix("figures"))


def measured(checkouts: dict[str, Path], instances: int) -> dict[str, list[list[float]]]:
    """Return the figures of each arm for each instance; the first three instances warm up."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    sys.path.insert(0, str(ROOT))
    from tests.helpers.shipped_tasks import shipped

    luck = random.Random(0)
    names = [one.instance_id for one in luck.sample(shipped("train"), instances + 3)]
    command = [sys.executable, str(Path(__file__).resolve()), "--arm", "--json", os.devnull]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    arms = {
        arm: subprocess.Popen(command, cwd=at, env=os.environ | {"PYTHONPATH": str(at)}, **pipes)
        for arm, at in checkouts.items()
    }
    rows: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for name in names:
        for arm in luck.sample(sorted(arms), len(arms)):
            rows[arm].append(played(arms[arm], name))
    for process in arms.values():
        process.stdin.close()
        process.wait(60)
    return {arm: values[3:] for arm, values in rows.items()}


def main() -> None:
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--baseline", default="8f2a9b6")
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    given, load = parser.parse_args(), load_average()
    if given.arm:
        work()
        return
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder, "old")
        git("worktree", "add", "-q", "--detach", str(old), given.baseline)
        try:
            rows = measured({"here": ROOT, "baseline": old}, given.instances)
        finally:
            git("worktree", "remove", "--force", str(old))
    result = {
        **provenance(given, load, packages=()),
        "baseline": given.baseline,
        "instances": given.instances,
    }
    for n, figure in enumerate(FIGURES):
        here, then = ([row[n] for row in rows[arm]] for arm in ("here", "baseline"))
        ratios = [a / b for a, b in zip(here, then, strict=True)]
        result[figure] = {
            "here, ms": round(1000 * statistics.median(here), 1),
            "baseline, ms": round(1000 * statistics.median(then), 1),
            "ratio": round(statistics.median(ratios), 2),
            "quartiles": [round(q, 2) for q in statistics.quantiles(ratios, n=4)[::2]],
        }
    write_result(given.json, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
