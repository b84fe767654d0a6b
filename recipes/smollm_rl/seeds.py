"""Measures the held-out reward of each task over several seeds of the recipe, and the minutes of each part.

Runs the seeds that are missing under `--runs`, one after the other, then writes `--out`. A finished run
is not repeated. Intervals are 95%: Wilson's over the held-out prompts of a seed, Student's over seeds.

    python -m recipes.smollm_rl.seeds [--runs runs/smollm_rl] [--seeds 0 1 2] [--out FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from recipes.runs import over_seeds, play, records
from recipes.smollm_rl.tasks import TASKS
from rlpipe.metrics.statistics import Interval, wilson

PARTS = ("wait_rollout", "update_actor", "update_weights", "validate")  # parts of a run, by timing_s/NAME


def measured(directory: Path) -> dict[str, Any]:
    """Return the figures of one run: rewards of each task, first and last entropy, minutes."""
    lines, steps = records(directory)
    validated = [line for line in lines if "val/reward" in line]
    before, after = validated[0], validated[-1]
    tasks = {
        task: {"before": _reward(before, task), "after": _reward(after, task)}
        for task in TASKS
        if f"val/{task}/reward" in before
    }
    minutes = {name: sum(line.get(f"timing_s/{name}") or 0.0 for line in lines) / 60 for name in PARTS}
    return {
        "tasks": tasks,
        "steps": len(steps),
        "entropy": [round(steps[0]["rollout/entropy"], 3), round(steps[-1]["rollout/entropy"], 3)],
        "minutes": {name: round(value, 2) for name, value in minutes.items()} | {"run": _minutes(directory)},
    }


def _reward(line: dict[str, Any], task: str) -> dict[str, Any]:
    """Return a reward that is 0 or 1 in each attempt, with its interval."""
    reward, attempts = line[f"val/{task}/reward"], round(line[f"val/{task}/trajectories"])
    interval: Interval = wilson(reward, attempts)
    return {"reward": round(reward, 4), "interval": _ends(interval), "attempts": attempts}


def _ends(interval: Interval) -> list[float]:
    return [round(interval.low, 4), round(interval.high, 4)]


def _minutes(directory: Path) -> float:
    """Return the minutes from the first to the last event."""
    times = [json.loads(line)["time"] for line in (directory / "events.jsonl").read_text().splitlines()]
    return round((max(times) - min(times)) / 60, 2)


def summary(by_seed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return reward before and after, and the gain, over seeds, for each task and the mean of all tasks."""
    runs = [run["tasks"] for run in by_seed.values()]
    ends = {
        task: {end: [run[task][end]["reward"] for run in runs] for end in ("before", "after")}
        for task in runs[0]
    }
    ends["mean"] = {
        end: [sum(run[task][end]["reward"] for task in run) / len(run) for run in runs]
        for end in ("before", "after")
    }

    table = {}
    for task, values in ends.items():
        gains = [after - before for before, after in zip(values["before"], values["after"], strict=True)]
        estimates = {name: over_seeds(column) for name, column in {**values, "gain": gains}.items()}
        table[task] = {
            name: {"mean": round(estimate.value, 4), "interval": _ends(estimate.interval)}
            for name, estimate in estimates.items()
        }
    return table


def main() -> None:
    """Run the missing seeds, measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm_rl"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("overrides", nargs="*", help="further settings of every run, key=value")
    args = parser.parse_args()

    by_seed = {}
    for seed in args.seeds:
        directory, started = args.runs.resolve() / f"seed_{seed}", time.monotonic()
        play("smollm_rl", directory, f"run.seed={seed}", *args.overrides)
        by_seed[f"seed_{seed}"] = measured(directory)
        print(f"seed {seed}: {(time.monotonic() - started) / 60:.1f} minutes", flush=True)

    results = {"overrides": args.overrides, "over_seeds": summary(by_seed), "by_seed": by_seed}
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    for task, ends in results["over_seeds"].items():
        print(f"{task:10}" + "  ".join(f"{name} {value['mean']:.3f}" for name, value in ends.items()))


if __name__ == "__main__":
    main()
