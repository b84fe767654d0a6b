"""How acceptance falls with entropy, and why it moves in RL: Bebop's Figures 3 and 8 on adapted drafts.

    python recipes/mtp_adapt/slopes.py --drafts hard_ce=DIR kl=DIR e2e_tv=DIR [--temperatures 0.6 1 1.4]
        [--rl-steps 40] [--runs runs/slopes] [--json OUT] [--figure OUT.svg] [key=value ...]

Sweep: for every draft and temperature, one step of the main job runs on the same prompts. Its probe records,
for every context of the policy's own text, the target's entropy and the acceptance under rejection (1 - TV)
and under target-only (p of q's argmax). The slope is taken over all temperatures, per token (each context is
a point) and per sequence (means of a trajectory), in acceptance per nat; errors are clustered by trajectory.

RL: every draft has one run under rejection; the first draft also has one under target-only. Eq. 16 splits the
change of the acceptance rate from the early phase to the last steps. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs import play

from rlpipe.diagnosis.decomposition import decompose, decompose_each, paired
from rlpipe.diagnosis.fixed_contexts import Pooled, pool
from rlpipe.diagnosis.probe import read_probes
from rlpipe.diagnosis.regression import cross_section
from rlpipe.metrics.runs import load_run
from rlpipe.metrics.statistics import Estimate

RULES = ("rejection", "target_only")
RATE, ENTROPY = "spec/acceptance_rate", "rollout/entropy"
SWEEP = ["run.steps=1", "metrics.probe.every=1", "metrics.probe.contexts=4000", "val.every=0"]


def run(directory: Path, *overrides: str) -> Path:
    """Run the main job in one process, with few records."""
    own = ["cluster=inline", "run.save_every=0", "metrics.wandb=off", "metrics.report=false"]
    return play("swe_rl", directory, *own, *overrides)


def joined(parts: list[Pooled]) -> Pooled:
    """Join the contexts of several runs, clustered by trajectory."""
    offsets = np.cumsum([0, *(part.clusters.max() + 1 for part in parts[:-1])])
    return Pooled(
        alpha=np.concatenate([part.alpha for part in parts]),
        entropy=np.concatenate([part.entropy for part in parts]),
        clusters=np.concatenate([part.clusters + n for part, n in zip(parts, offsets, strict=True)]),
    )


def by_sequence(points: Pooled) -> Pooled:
    """Return the means of each trajectory."""
    labels, members = np.unique(points.clusters, return_inverse=True)
    size = np.bincount(members)
    alpha, entropy = (np.bincount(members, weights=x) / size for x in (points.alpha, points.entropy))
    return Pooled(alpha=alpha, entropy=entropy, clusters=labels)


def plain(estimate: Estimate) -> dict[str, float]:
    """Return value, standard error and interval."""
    return {
        "value": round(estimate.value, 4),
        "se": round(estimate.se, 4),
        "low": round(estimate.low, 4),
        "high": round(estimate.high, 4),
        "level": estimate.level,
    }


def sweep(args: argparse.Namespace, drafts: dict[str, Path], overrides: list[str]) -> dict[str, Any]:
    """Measure the slopes of every draft and rule."""
    found: dict[str, Any] = {}
    for name, draft in drafts.items():
        runs = [
            run(
                args.runs / f"sweep_{name}_T{temperature:g}",
                f"model.path={draft}",
                f"rollout.temperature={temperature:g}",
                *SWEEP,
                *overrides,
            )
            for temperature in args.temperatures
        ]
        probes = [next(iter(read_probes(directory))) for directory in runs]
        for rule in RULES:
            parts = [pool(tables[: head["fixed"]], rule, None) for head, tables in probes]
            points = joined(parts)
            labels = [f"{temperature:g}" for temperature in args.temperatures]
            found[f"{name}/{rule}"] = {
                "acceptance": {t: mean(part.alpha) for t, part in zip(labels, parts, strict=True)},
                "entropy": {t: mean(part.entropy) for t, part in zip(labels, parts, strict=True)},
                "contexts": len(points.alpha),
                "per_token": slope(points),
                "per_sequence": slope(by_sequence(points)),
            }
    return found


def mean(values: np.ndarray) -> float:
    """Return the mean, rounded to four digits."""
    return round(float(values.mean()), 4)


def slope(points: Pooled) -> dict[str, float]:
    """Regress acceptance on entropy."""
    return plain(cross_section(points.alpha, points.entropy, points.clusters, level=0.95))


def train(args: argparse.Namespace, drafts: dict[str, Path], overrides: list[str]) -> dict[str, Path]:
    """Train RL runs and return them by label: target-only with the first draft, rejection with each."""
    arms = [("target_only", next(iter(drafts)))] + [("rejection", name) for name in drafts]
    return {
        f"{mode}, {name}": run(
            args.runs / f"rl_{mode}_{name}",
            f"model.path={drafts[name]}",
            f"spec.mode={mode}",
            f"run.steps={args.rl_steps}",
            "val.every=0",
            *overrides,
        )
        for mode, name in arms
    }


def draw(out: Path, found: dict[str, Any], runs: dict[str, Path], args: argparse.Namespace) -> None:
    """Draw acceptance over entropy by draft and rule (left), and the mismatch part over RL steps (right)."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2 if runs else 1, figsize=(9 if runs else 5, 3.6), squeeze=False)
    colours = dict(zip(dict.fromkeys(key.split("/")[0] for key in found), COLOURS, strict=False))
    for key, row in found.items():
        name, rule = key.split("/")
        entropy, rate = (
            [row[what][f"{t:g}"] for t in args.temperatures] for what in ("entropy", "acceptance")
        )
        style = "-" if rule == "rejection" else ":"
        axes[0, 0].plot(entropy, rate, style, marker="o", ms=3, color=colours[name], label=f"{name}, {rule}")
    axes[0, 0].set(xlabel="target entropy (nat)", ylabel="acceptance of a draft", title="temperature sweep")
    axes[0, 0].legend(fontsize=6)
    for (label, directory), colour in zip(runs.items(), ["#999999", *COLOURS], strict=False):
        parts = decompose_each(*paired(load_run(directory), RATE, ENTROPY))
        steps = [part.window[1] for part in parts]
        axes[0, 1].plot(steps, [part.mismatch.value for part in parts], color=colour, label=label)
        axes[0, 1].plot(steps, [part.entropy.value for part in parts], "--", lw=0.8, color=colour)
    if runs:
        axes[0, 1].axhline(0, color="k", lw=0.5)
        axes[0, 1].set(
            xlabel="step", ylabel="change of acceptance", title="RL: mismatch (solid), entropy (dashed)"
        )
        axes[0, 1].legend(fontsize=6)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out)


COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]


def main() -> None:
    """Start the missing runs, measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", nargs="+", required=True, help="NAME=CHECKPOINT")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 1.0, 1.4])
    parser.add_argument("--rl-steps", type=int, default=40, help="0: no RL runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/slopes"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run, key=value")
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    drafts = {name: Path(path).resolve() for name, path in (item.split("=", 1) for item in args.drafts)}
    found = sweep(args, drafts, args.set)
    result: dict[str, Any] = {"sweep": found, "temperatures": args.temperatures, "overrides": args.set}
    write(args.json, result)
    runs = train(args, drafts, args.set) if args.rl_steps else {}
    for label, directory in runs.items():
        parts = decompose(*paired(load_run(directory), RATE, ENTROPY), level=0.95)
        result.setdefault("rl", {})[label] = {
            "steps": args.rl_steps,
            "early": parts.early,
            "window": parts.window,
            "entropy_change": round(parts.entropy_change, 4),
            **{name: plain(getattr(parts, name)) for name in ("slope", "total", "entropy", "mismatch")},
        }
    write(args.json, result)
    print(json.dumps(result, indent=1))
    if args.figure:
        draw(args.figure, found, runs, args)


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the results so far."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
