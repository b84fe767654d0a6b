"""Measures the claim of this recipe: rejection against no drafts, three seeds, everything else equal.

Starts the runs that are missing under `--runs`, then writes `--out` (and `curves.svg` where matplotlib is
installed), by default next to this file. If `--out` is in another folder, `curves.svg` here is not changed.
Finished runs are not repeated; interrupted runs are resumed.

    python recipes/swe_rl/study.py [--runs DIR] [--seeds 0 1 2] [--modes rejection none] [--out JSON]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from runs import legend, play, records, validation  # noqa: E402

SETS = {"held_instances": "new instances", "held_families": "new families"}


def curve(directory: Path) -> dict[str, object]:
    """Return validation and training figures of a run by step, and of its first and last steps."""
    lines, steps = records(directory)
    outcome: dict[str, object] = {
        "train_reward": [round(r["critic/rewards/mean"], 4) for r in steps],
        "entropy": [round(r["rollout/entropy"], 4) for r in steps],
        "acceptance_length": [r.get("spec/acceptance_length") for r in steps],
        "seconds": round(lines[-1]["time"] - lines[0]["time"], 1),
        "median_tokens_per_s_rollout": round(
            statistics.median(
                r["perf/tokens_per_s/rollout"] for r in steps if "perf/tokens_per_s/rollout" in r
            )
        ),
    }
    for name in ("routes/flipped", "training/rollout_probs_diff_mean"):  # of an MoE
        if "routes/flipped" in steps[-1]:
            outcome[name] = [r.get(name) for r in steps]
    for split in SETS:
        points = validation(lines, f"val/{split}")
        (_, before, se_before), (_, after, se_after) = points[0], points[-1]
        outcome[split] = {
            "curve": points,
            "before": before,
            "after": after,
            "gain": round(after - before, 4),
            "se_before": se_before,
            "se_after": se_after,
        }
    return outcome


def draw(results: dict[str, dict[str, object]], out: Path) -> None:
    """Draw both held-out sets over steps, one line per run, coloured by mode."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    colours = {"rejection": "#0072B2", "none": "#E69F00"}
    figure, axes = plt.subplots(1, len(SETS), figsize=(9, 3.4), sharey=True)
    for axis, (split, title) in zip(axes, SETS.items(), strict=True):
        for name, result in results.items():
            mode = name.split("-")[0]
            steps, rewards, errors = zip(*result[split]["curve"], strict=True)
            axis.errorbar(steps, rewards, errors, color=colours[mode], capsize=2, lw=1.2, label=mode)
        axis.set(title=title, xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation reward (T = 1)")
    legend(axes[0], axes[1], title="spec.mode", loc="upper right")
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Run, collect the results, and draw them."""
    parser = argparse.ArgumentParser(description="Three seeds, rejection against none.")
    parser.add_argument("--runs", type=Path, default=Path("runs/swe_rl_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", default=["rejection", "none"])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args, overrides = parser.parse_known_args()
    results: dict[str, dict[str, object]] = {}
    for seed in args.seeds:
        for mode in args.modes:
            directory = args.runs / f"{mode}-{seed}"
            play("swe_rl", directory, f"run.seed={seed}", f"spec.mode={mode}", *overrides)
            results[f"{mode}-{seed}"] = curve(directory)
    args.out.write_text(json.dumps({"overrides": overrides, "runs": results}, indent=1) + "\n")
    try:
        draw(results, args.out.with_name("curves.svg"))
    except ImportError:
        print("matplotlib is not installed: curves.svg was not drawn (pip install matplotlib)")


if __name__ == "__main__":
    main()
