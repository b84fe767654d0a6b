"""Is an EAGLE-3 draft that trains together with the policy better than one that stays frozen?

    python recipes/eagle3/rl_study.py [--runs runs/eagle3_rl] [--draft-steps 40] [--seeds 0 1 2]

1 draft     a new draft for the shipped model, after few and after many steps of recipes/eagle3
2 sweep     for each draft, co-training at each learning rate on a separate seed; the rate with the highest
            acceptance at the deepest draft is used
3 cells     each seed with the draft frozen (draft.train=off) and co-trained (online), from the same draft

Decoding is lossless in both arms, so the policies differ only by chance. Acceptance by depth is counted over
the second half of the steps: accepted / reached. The difference is taken within a seed; its interval is
Student's over seeds. Writes rl_results.json next to this file; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from runs import over_seeds, play, records  # noqa: E402

SWEEP_SEED, DRAFT_SEED = 1000, 1001


def acceptance(directory: Path, gamma: int) -> dict[str, float]:
    """Return acceptance by depth and acceptance length, from counts of the second half of a run's steps."""
    _, steps = records(directory)
    kept = [0] * (gamma + 1)
    for step in steps[len(steps) // 2 :]:
        for accepted, count in enumerate(step["spec/num_accepted"]["counts"]):
            kept[accepted] += int(count)
    reached = [sum(kept[depth:]) for depth in range(gamma + 1)]
    found = {f"depth_{k}": reached[k] / reached[k - 1] for k in range(1, gamma + 1)}
    return found | {"length": 1 + sum(reached[1:]) / reached[0]}


def plain(differences: list[float]) -> dict[str, object]:
    """Return the mean and the half width of the interval over seeds."""
    found = over_seeds(differences)
    return {
        "mean": round(found.value, 4),
        "half_width": round(found.half_width, 4) if len(differences) > 1 else None,
        "by_seed": [round(one, 4) for one in differences],
    }


def study(args: argparse.Namespace, draft_steps: int) -> dict[str, object]:
    """Run all stages for one draft."""
    folder = args.runs / f"draft_{draft_steps}"
    options = [f"run.seed={DRAFT_SEED}", f"run.steps={draft_steps}", f"spec.gamma={args.gamma}"]
    options += ["adapt.batch=8", "adapt.prompts=64", "adapt.out_of_domain=[]", "adapt.eval_first=false"]
    draft = play("eagle3", folder / "draft", *options, f"adapt.rollouts={args.runs.resolve()}/rollouts.jsonl")

    def arm(name: str, seed: int, *options: str) -> dict[str, float]:
        settings = [f"run.seed={seed}", f"run.steps={args.steps}", "cluster=inline", "val.every=0"]
        settings += [
            "spec.drafter=eagle3",
            f"spec.draft_path={(draft / 'draft').resolve()}",
            *args.set,
            *options,
        ]
        directory = play("swe_rl", folder / f"{name}-{seed}", f"spec.gamma={args.gamma}", *settings)
        return acceptance(directory, args.gamma)

    def trained(lr: float, seed: int) -> dict[str, float]:
        return arm(f"online_{lr:g}", seed, "draft.train=online", "draft.objective=kl", f"draft.lr={lr}")

    deepest = f"depth_{args.gamma}"
    sweep = {lr: trained(lr, SWEEP_SEED) for lr in args.lrs}
    lr = max(sweep, key=lambda rate: sweep[rate][deepest])
    cells = [{"frozen": arm("frozen", seed), "online": trained(lr, seed)} for seed in args.seeds]
    figures = list(cells[0]["frozen"])
    gaps = {f: [c["online"][f] - c["frozen"][f] for c in cells] for f in figures}
    return {
        "learning_rate": lr,
        "sweep": {f"{rate:g}": round(found[deepest], 4) for rate, found in sweep.items()},
        "frozen": {f: round(statistics.fmean(c["frozen"][f] for c in cells), 4) for f in figures},
        "online": {f: round(statistics.fmean(c["online"][f] for c in cells), 4) for f in figures},
        "online minus frozen": {f: plain(gap) for f, gap in gaps.items()},
    }


def main() -> None:
    """Start the missing runs; write and print the results after each draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/eagle3_rl"))
    parser.add_argument("--draft-steps", type=int, nargs="+", default=[40, 200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-4, 1e-3])
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of the runs, key=value")
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "runs"}
    results: dict[str, object] = {"settings": settings}
    for draft_steps in args.draft_steps:
        results[f"draft of {draft_steps} steps"] = study(args, draft_steps)
        (HERE / "rl_results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
