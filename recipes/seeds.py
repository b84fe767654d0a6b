"""What a recipe reaches over several seeds: held-out reward before and after, and the gain.

Runs the seeds that are missing under `--runs`, one after the other, then writes `recipes/RECIPE/results.json`
(`--out`). A finished run is not repeated. Intervals are 95%, Student's over seeds.

    python -m recipes.seeds frozen_lake [--seeds 0 1 2] [--runs runs] [--out FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recipes.runs import over_seeds, play, records, validation


def measured(directory: Path) -> dict[str, Any]:
    """Return the held-out rewards of one run as [step, reward, standard error], and its minutes."""
    lines, steps = records(directory)
    times = [json.loads(line)["time"] for line in (directory / "events.jsonl").read_text().splitlines()]
    return {
        "validation": validation(lines),
        "train_reward": [round(line["critic/rewards/mean"], 3) for line in steps],
        "minutes": round((max(times) - min(times)) / 60, 2),
    }


def summary(by_seed: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean and interval over seeds of the reward before, after, and of the gain."""
    before = [run["validation"][0][1] for run in by_seed.values()]
    after = [run["validation"][-1][1] for run in by_seed.values()]
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
    """Run the missing seeds, measure, write."""
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
