"""How much of a step do the ledger and the metrics cost? Goal: less than 2%.

The main job (swe_rl) runs in one process, so that every part of it can be measured. Timed are the calls of
the ledger, the metrics bus, its sinks (on their threads), spans, recorded rollouts, alarms and advice, and of
the metrics computed from trajectories; each call adds the CPU seconds of its thread. Two shares of the steps'
time are reported: the calls' CPU seconds (which other work cannot use), and the wall-clock seconds that
the loop spent in them. The second share includes interruptions by other threads, so it is larger on a busy
machine. Not included are the probe, which reads the model and has its own metric (timing_s/probe); the sums
that the trainer takes of its tensors; the report at the end; and W&B, whose service is a separate process
(metrics.wandb=off here). Other load on the cores makes steps longer and the shares smaller, so milliseconds
of CPU per step are reported as well.

A second arm switches off every part that can be switched off (no console, trace, recorded rollouts or
advice), in runs that alternate with those of the first arm. Unless noise hides it, the difference between the
arms should equal the cost that the first arm attributes to these parts.

    python scripts/bench/overhead.py --json OUT [--steps 12] [--repeats 3]
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3
JOB = ["+recipe=swe_rl", "cluster=inline", "val.every=0", "run.save_every=0", "metrics.probe.every=0"]
QUIET = ["metrics.report=false", "metrics.wandb=off"]
OFF = [
    "metrics.console=false",
    "metrics.trace=false",
    "metrics.rollouts_per_step=0",
    "metrics.advice.enabled=false",
]
# part -> "module:Class" (all its public methods), "module:Class.method" or "module:function"
PARTS = {
    "ledger": ["rlpipe.loop.ledger:Ledger"],
    "bus": [f"rlpipe.metrics.bus:MetricsBus.{name}" for name in ("emit", "commit", "event")],
    "sinks": [
        "rlpipe.metrics.jsonl:MetricsFile",
        "rlpipe.metrics.jsonl:EventsFile",
        "rlpipe.metrics.console:ConsoleSink",
        "rlpipe.metrics.trace:TraceFile",
    ],
    "spans": [f"rlpipe.metrics.spans:SpanLog.{name}" for name in ("_begin", "_end", "drain")],
    "records": [
        "rlpipe.metrics.rollouts:RolloutFiles.write",
        "rlpipe.loop.controller:Controller._record_trajectories",
    ],
    "judging": ["rlpipe.diagnosis.monitor:Monitor.see"],
    "trajectory metrics": [
        "rlpipe.loop.controller:trajectory_metrics",
        "rlpipe.loop.backlog:Backlog.metrics",
    ],
}
_inside = threading.local()
_spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])  # part -> CPU s, s, calls


def counted(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Wrap `function` so that its time is added to a part; nested calls count as the outer one."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "part", None):
            return function(*args, **kwargs)
        _inside.part = part
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent = _spent[part]
            spent[0] += time.thread_time() - cpu
            spent[1] += time.perf_counter() - wall
            spent[2] += 1
            _inside.part = None

    return call


def instrument() -> None:
    """Count the time of everything in PARTS."""
    for part, places in PARTS.items():
        for place in places:
            module_name, _, name = place.partition(":")
            holder: Any = importlib.import_module(module_name)
            *outer, last = name.split(".")
            for step in outer:
                holder = getattr(holder, step)
            if not inspect.isclass(getattr(holder, last)):
                setattr(holder, last, counted(getattr(holder, last), part))
                continue
            owner = getattr(holder, last)
            for method, function in inspect.getmembers(owner, inspect.isfunction):
                if not method.startswith("_"):
                    setattr(owner, method, counted(function, part))


def child(out: Path, steps: int) -> None:
    """Run one arm in this process, and write the counts after the warm-up to `out`."""
    instrument()
    from rlpipe.metrics.bus import MetricsBus

    at: dict[str, Any] = {}
    commit = MetricsBus.commit

    def clocked(bus: MetricsBus, step: int) -> Any:
        record = commit(bus, step)
        moment = {"wall": time.perf_counter(), "cpu": time.process_time()}
        if step == WARM_UP:
            at["begin"] = moment | {"spent": {part: list(spent) for part, spent in _spent.items()}}
        if step == steps:
            at["end"] = moment | {"spent": {part: list(spent) for part, spent in _spent.items()}}
        return record

    MetricsBus.commit = clocked
    from rlpipe.cli.run import main

    try:
        main()
    finally:
        out.write_text(json.dumps(at))


def run(overrides: list[str], steps: int, seed: int) -> dict[str, Any]:
    """Return the seconds of the steps of one run, and the share of each counted part."""
    with tempfile.TemporaryDirectory() as directory:
        counted_file = Path(directory) / "counted.json"
        settings = [*JOB, *QUIET, *overrides, f"run.dir={directory}/run", f"run.steps={steps}"]
        subprocess.run(
            [
                sys.executable,
                __file__,
                "--child",
                str(counted_file),
                str(steps),
                *settings,
                f"run.seed={seed}",
            ],
            cwd=ROOT,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        at = json.loads(counted_file.read_text())
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [r["timing_s/step"] for r in map(json.loads, lines) if "timing_s/step" in r][WARM_UP:]
    begin, end = at["begin"], at["end"]
    wall = end["wall"] - begin["wall"]
    parts = {}
    for part, spent in end["spent"].items():
        before = begin["spent"].get(part, [0.0, 0.0, 0])
        cpu, stood, calls = (now - then for now, then in zip(spent, before, strict=True))
        parts[part] = {
            "cpu_share": cpu / wall,
            "cpu_s": cpu / len(seconds),
            "wall_share": stood / wall,
            "calls_per_step": calls / len(seconds),
        }
    return {
        "seconds": seconds,
        "parts": parts,
        "cpu_per_s": (end["cpu"] - begin["cpu"]) / wall,
        "cpu_s": sum(part["cpu_s"] for part in parts.values()),
        "cpu_share": sum(part["cpu_share"] for part in parts.values()),
        "wall_share": sum(part["wall_share"] for name, part in parts.items() if name != "sinks"),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the runs of one arm."""
    seconds = [s for one in runs for s in one["seconds"]]
    quartiles = statistics.quantiles(seconds, n=4)
    return {
        "step_median_s": round(statistics.median(seconds), 3),
        "step_mean_s": round(statistics.fmean(seconds), 3),
        "step_quartiles_s": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "step_mean_s_of_runs": [round(statistics.fmean(one["seconds"]), 3) for one in runs],
        "cpu_ms_per_step_of_runs": [round(1000 * one["cpu_s"], 2) for one in runs],
        "cpu_share_percent_of_runs": [round(100 * one["cpu_share"], 3) for one in runs],
        "wall_share_percent_of_runs": [round(100 * one["wall_share"], 3) for one in runs],
        "cpu_of_the_process_per_second": [round(one["cpu_per_s"], 2) for one in runs],
        "parts": {
            part: {
                key: round(statistics.fmean(one["parts"][part][key] for one in runs) * scale, 4)
                for key, scale in (
                    ("cpu_share", 100),
                    ("wall_share", 100),
                    ("cpu_s", 1),
                    ("calls_per_step", 1),
                )
            }
            for part in runs[0]["parts"]
        },
    }


def main() -> None:
    """Alternate the arms and write one JSON."""
    if len(sys.argv) > 3 and sys.argv[1] == "--child":
        out, steps = Path(sys.argv[2]), int(sys.argv[3])
        sys.argv = [sys.argv[0], *sys.argv[4:]]
        sys.path.insert(0, str(ROOT))
        child(out, steps)
        return
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    load = load_average()
    runs: dict[str, list[dict[str, Any]]] = {"usual": [], "off": []}
    for seed in range(given.repeats):
        for arm, overrides in (("usual", []), ("off", OFF)):
            runs[arm].append(run(overrides, given.steps, seed))
    arms = {arm: summary(told) for arm, told in runs.items()}
    means = {arm: statistics.fmean(arms[arm]["step_mean_s_of_runs"]) for arm in arms}
    report = {
        "question": "share of step time spent in ledger and metrics, percent (goal: less than 2)",
        **provenance(given, load),
        "warm_up_steps": WARM_UP,
        "job": [*JOB, *QUIET],
        "switched_off": OFF,
        "arms": arms,
        "cpu_share_percent": round(statistics.fmean(arms["usual"]["cpu_share_percent_of_runs"]), 3),
        "wall_share_percent": round(statistics.fmean(arms["usual"]["wall_share_percent_of_runs"]), 3),
        "usual_against_off_percent": round(100 * (means["usual"] / means["off"] - 1), 2),
    }
    print(json.dumps(report, indent=1))
    write_result(given.json, report)


if __name__ == "__main__":
    main()
