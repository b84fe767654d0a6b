"""Reward, turns and acceptance by step of this recipe, on all kinds of question and on one kind.

Starts the runs that are missing under `--runs`, then writes `results.json` and `curves.svg` next to this
file. Finished runs are not repeated; interrupted runs are resumed.

    python recipes/agent_rl/study.py [--runs runs/agent_rl_study] [--seeds 0] [--steps 40] [key=value ...]
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

SETS = ("held_instances", "held_families")
ARMS = {"all": [], "value": ["env.tools.families=[value]"]}
TITLES = {"all": "all four kinds", "value": "one lookup"}
COLOURS = {"all": "#0072B2", "value": "#D55E00"}


def measured(directory: Path) -> dict[str, Any]:
    """Return figures of a run: validation by set; reward, turns and acceptance length by step."""
    lines, steps = records(directory)
    return {
        **by_step(steps),
        "turns": [round(r["num_turns/mean"], 2) for r in steps],
        **{split: validation(lines, f"val/{split}") for split in SETS},
    }


def draw(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Plot reward on new questions and in training batches (left), turns and acceptance length (right)."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "agent_rl"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for name, result in results.items():
        arm = name.split("/")[0]
        steps = range(1, len(result["train_reward"]) + 1)
        colour, title = COLOURS[arm], TITLES[arm]
        left.plot(steps, result["train_reward"], color=colour, lw=0.7, alpha=0.4)
        places, rewards, errors = zip(*result["held_instances"], strict=True)
        left.errorbar(places, rewards, errors, color=colour, capsize=2, lw=1.6, label=title)
        right.plot(steps, result["turns"], color=colour, label=f"turns, {title}")
        right.plot(steps, result["acceptance_length"], ":", color=colour, label=f"acceptance length, {title}")
    left.set(xlabel="step", ylabel="reward (T = 1)", ylim=(0, 1))
    left.set_title("new questions; thin: training batches", fontsize=9)
    right.set(xlabel="step", ylim=(0, None))
    save(figure, out, fontsize=7)


def main() -> None:
    """Start the missing runs, measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/agent_rl_study"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("overrides", nargs="*", help="further settings of every run, key=value")
    args = parser.parse_args()
    results = {}
    for arm in args.arms:
        for seed in args.seeds:
            directory = args.runs.resolve() / f"{arm}_seed_{seed}"
            own = [f"run.seed={seed}", f"run.steps={args.steps}", *ARMS[arm]]
            play("agent_rl", directory, *own, *args.overrides)
            results[f"{arm}/seed_{seed}"] = measured(directory)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "curves.svg")


if __name__ == "__main__":
    main()
