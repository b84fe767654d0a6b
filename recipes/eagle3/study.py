"""How much do the training-time test and fused features improve an EAGLE-3 draft?

    python recipes/eagle3/study.py [--runs runs/eagle3_study] [--arms eagle3 no_test ...] [--seeds 0]

Every arm trains a new draft for the same steps on the same rollouts of the frozen model, and is measured in
real generation on held-out prompts. Finished runs are not repeated. Arms:

    eagle3      fused features, a training-time test of --gamma steps
    no_test     one step: deeper drafts start from states that were never trained on
    top         only features of the last layer
    small_vocab the 256 most frequent tokens

Writes results.json and table.md: acceptance by depth (given that the depth before was accepted), and the
difference of each arm from `eagle3`, paired by prompt, with standard errors clustered by prompt. The errors
do not cover the variation between seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mtp_adapt"))

import study as adaptation

from rlpipe.adapt.estimates import LENGTH, RATE, Counts, difference, estimate, pooled
from rlpipe.adapt.evaluation import Evaluation
from rlpipe.config.paths import resolve
from rlpipe.models.checkpoint import read_config

BASELINE = "eagle3"


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the overrides of each arm."""
    top = int(read_config(resolve(args.model))["num_hidden_layers"]) - 1
    test = [f"draft.depths={args.gamma}"]
    return {
        "eagle3": test,
        "no_test": ["draft.depths=1"],
        "top": [*test, f"eagle3.layers=[{top}]"],
        "small_vocab": [*test, "eagle3.draft_vocab=256"],
    }


def train(study: adaptation.Study, arm: str, seed: int) -> Evaluation:
    """Train one draft from scratch; return its measurements after the last step."""
    args = study.args
    overrides = [f"model.path={args.model}", "adapt.drafter=eagle3", f"draft.objective={args.loss}"]
    overrides += [f"draft.lr={args.lr}", f"spec.gamma={args.gamma}", *arms(args)[arm]]
    measured = [f"adapt.in_domain=[{','.join(args.in_domain)}]", "adapt.eval_modes=[rejection]"]
    measured += [f"adapt.out_of_domain=[{','.join(args.out_of_domain)}]"]
    measured += [f"adapt.eval_prompts={args.eval_prompts}", f"adapt.eval_samples={args.eval_samples}"]
    run = study.run(f"{arm}_seed{seed}", *overrides, seed=seed, steps=args.steps, evaluate=measured)
    return adaptation.last_evaluation(run, args.steps)


def table(cells: dict[str, list[Evaluation]]) -> dict[str, Any]:
    """Return figures by domain and arm, and differences from the baseline if it was run."""
    found: dict[str, Any] = {}
    some = next(iter(cells.values()))[0]
    figures = [LENGTH, RATE, *(f"{RATE}/depth_{k}" for k in range(1, some.gamma + 1))]
    for domain in some.domains:
        by_arm: dict[str, Counts] = {
            arm: pooled(one.counts(domain, "rejection") for one in seeds) for arm, seeds in cells.items()
        }
        found[domain] = {}
        for arm, counts in by_arm.items():
            row = {name: adaptation.rounded(estimate(counts, name)) for name in figures}
            if arm != BASELINE and BASELINE in by_arm:
                gaps = {name: difference(counts, by_arm[BASELINE], name) for name in figures}
                row |= {f"{name} minus {BASELINE}": adaptation.rounded(gap) for name, gap in gaps.items()}
            found[domain][arm] = row | {"prompts": len(counts)}
    return found


def markdown(found: dict[str, Any], gamma: int) -> str:
    """Format a table for each domain."""
    lines = []
    for domain, rows in found.items():
        depths = [f"{RATE}/depth_{k}" for k in range(1, gamma + 1)]
        head = ["arm", "acceptance length", *(f"depth {k}, %" for k in range(1, gamma + 1))]
        lines += [f"### {domain}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for arm, row in rows.items():
            cells = [f"{row[LENGTH][0]:.3f} ± {row[LENGTH][1] or 0:.3f}"]
            cells += [adaptation.percent(row[name]) for name in depths]
            lines.append("| " + " | ".join([arm, *cells]) + " |")
            if f"{RATE} minus {BASELINE}" in row:
                gap = row[f"{LENGTH} minus {BASELINE}"]
                cells = [f"{gap[0]:+.3f} ± {gap[1] or 0:.3f}"]
                cells += [adaptation.percent(row[f"{name} minus {BASELINE}"], "+") for name in depths]
                lines.append("| " + " | ".join([f"{arm} minus {BASELINE}", *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Start the missing runs, then write the two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/eagle3_study"))
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--arms", nargs="+", default=["eagle3", "no_test", "top"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="trajectories of a step")
    parser.add_argument("--prompts", type=int, default=128, help="training prompts of a seed's rollouts")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-prompts", type=int, default=40, help="of each held-out set")
    parser.add_argument("--eval-samples", type=int, default=1)
    parser.add_argument("--in-domain", nargs="+", default=["swe"])
    parser.add_argument("--out-of-domain", nargs="+", default=["reasoning"])
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run, key=value")
    args = parser.parse_args()
    if unknown := set(args.arms) - set(arms(args)):
        parser.error(f"--arms {sorted(unknown)}: choose of {', '.join(arms(args))}.")
    study, cells = adaptation.Study(runs=args.runs.resolve(), args=args), {}
    for arm in args.arms:
        cells[arm] = [train(study, arm, seed) for seed in args.seeds]
        found = table(cells)
        settings = {name: value for name, value in vars(args).items() if name != "runs"}
        (study.runs / "results.json").write_text(
            json.dumps({"settings": settings, "table": found}, indent=1) + "\n"
        )
        (study.runs / "table.md").write_text(markdown(found, args.gamma))
    print((study.runs / "table.md").read_text())


if __name__ == "__main__":
    main()
