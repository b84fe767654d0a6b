"""Measures the held-out reward of a recipe over several seeds: before and after the run, and the gain.

Runs the seeds that are missing under `--runs`, one after the other, then writes `recipes/RECIPE/results.json`
(`--out`). A finished run is not repeated. Intervals are 95%, Student's over seeds.

    python -m recipes.seeds frozen_lake [--seeds 0 1 2] [--runs runs] [--out FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from recipes.runs import over_seeds, play, records, validation

SET = re.compile(r"val/[^/]+/reward")


def measured(directory: Path) -> dict[str, Any]:
    """Return the held-out rewards of one run as [step, reward, standard error], and its minutes.

    In the result, `validation` is of the primary held-out set; `sets` is of each set if there are several.
    """
    lines, steps = records(directory)
    names = {name.split("/")[1] for line in lines for name in line if SET.fullmatch(name)}
    sets = {name: validation(lines, f"val/{name}") for name in sorted(names)} if len(names) > 1 else {}
    times = [json.loads(line)["time"] for line in (directory / "events.jsonl").read_text().splitlines()]
    return {
        "validation": validation(lines),
        **({"sets": sets} if sets else {}),
        "train_reward": [round(line["critic/rewards/mean"], 3) for line in steps],
        "minutes": round((max(times) - min(times)) / 60, 2),
    }


def summary(by_seed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return mean and interval over seeds of the reward before, after, and of the gain; by set if several."""
    runs = list(by_seed.values())
    if sets := runs[0].get("sets"):
        return {name: _summary([run["sets"][name] for run in runs]) for name in sets}
    return _summary([run["validation"] for run in runs])


def _summary(validations: list[list[list[float]]]) -> dict[str, dict[str, Any]]:
    before, after = ([measured[end][1] for measured in validations] for end in (0, -1))
    gains = [last - first for first, last in zip(before, after, strict=True)]
    estimates = {name: over_seeds(v) for name, v in {"before": before, "after": after, "gain": gains}.items()}
    return {
        name: {
            "mean": round(one.value, 4),
            "interval": [round(one.interval.low, 4), round(one.interval.high, 4)],
        }
        for name, one in estimates.items()
    }


def main() -> None:
    """Run the missing seeds, measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="further settings of every run, key=value")
    args = parser.parse_intermixed_args()

    by_seed = {}
    for seed in args.seeds:
        directory = args.runs.resolve() / args.recipe / f"seed_{seed}"
        by_seed[f"seed_{seed}"] = measured(play(args.recipe, directory, f"run.seed={seed}", *args.overrides))

    results = {"overrides": args.overrides, "over_seeds": summary(by_seed), "by_seed": by_seed}
    out = args.out or Path(__file__).parent / args.recipe / "results.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["over_seeds"]))


if __name__ == "__main__":
    main()
