"""Measures reward by step, in training and on held-out tasks, when this recipe trains the shipped model.

    python recipes/reasoning_rl/study.py [key=value ...] [--runs runs/reasoning_rl_study] [--seeds 0]

Starts the missing runs, then writes results.json and curves.svg next to this file. Validation samples the
same tasks for every seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from runs import by_step, play, records, save, validation  # noqa: E402


def measured(directory: Path) -> dict[str, Any]:
    """Return by step: reward of batches, [step, reward, standard error] of validation, acceptance length."""
    lines, steps = records(directory)
    return {**by_step(steps), "validation": validation(lines)}


def draw(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Draw reward (left), acceptance length and entropy (right)."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "reasoning_rl"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    for result in results.values():
        steps = range(1, len(result["train_reward"]) + 1)
        left.plot(steps, result["train_reward"], color="#0072B2", lw=0.7, alpha=0.5, label="training batches")
        left.errorbar(
            *zip(*result["validation"], strict=True), color="#D55E00", capsize=2, lw=1.6, label="held out"
        )
        right.plot(steps, result["acceptance_length"], color="#009E73", label="acceptance length, of 4")
        right.plot(steps, result["entropy"], ":", color="#555555", label="entropy, nats")
    left.set(xlabel="step", ylabel="reward (T = 1)", ylim=(0, None))
    right.set(xlabel="step", ylim=(0, None))
    save(figure, out, fontsize=8)


def main() -> None:
    """Run, collect the results, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/reasoning_rl_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args, overrides = parser.parse_known_args()
    results = {}
    for seed in args.seeds:
        directory = play("reasoning_rl", args.runs / f"seed_{seed}", f"run.seed={seed}", *overrides)
        results[f"seed_{seed}"] = measured(directory)
    (HERE / "results.json").write_text(json.dumps({"overrides": overrides, "runs": results}, indent=1) + "\n")
    draw(results, HERE / "curves.svg")


if __name__ == "__main__":
    main()
