"""A draft along RL runs of SmolLM2, frozen or trained as the policy changes (Bebop Fig. 2, 9a and 11).

    python -m recipes.smollm_rl.seeds --runs runs/smollm_rl
    python -m recipes.smollm_adapt.replay [--runs runs/smollm_rl] [--out recipes/smollm_adapt/results]

Each run of smollm_rl gives three policies: before RL, after it, and half way on the straight line between
their weights (`policies`). Entropy falls along this line. The draft is the shipped layer, which was trained
by total variation for the first policy. It stays frozen, or it takes a few steps of an objective on each
policy's own answers in turn, with one optimizer, while head and embedding follow the policy, as with
`draft.train=online`. Drafts never enter the policy's gradient, so all arms see the same policies and the same
held-out answers.

Measured at every policy, on its own answers to held-out prompts: accepted drafts of a window of three under
rejection and target-only, exact in expectation over the target's tokens, and the values of Bebop's Fig. 11;
under rejection also on its answers to prompts of kinds that RL does not train on ("out of domain").
The split attributes a part of the frozen draft's change to the fall of entropy: the slope over contexts
within texts before RL, times the change of entropy. The remainder is mismatch (Bebop Eq. 16).

An arm's learning rate is the best in the mean over all runs, on held-out answers other than those of the
result; hard CE is also trained at the rate of end-to-end TV.
The unit of every interval is the RL run (Student's, 95%, paired). A finished cell is not repeated. Writes
replay.json and the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.runs import choose_rate, kept, rounded_over_seeds, seeds_to_decide
from recipes.smollm_adapt import rules
from recipes.smollm_adapt.objectives import Drafts, batches, train
from recipes.smollm_adapt.policies import Policies, Policy, measure
from recipes.smollm_adapt.texts import Text

PARTS = (0.0, 0.5, 1.0)
ARMS = {
    "frozen": None,
    "online e2e TV": "e2e_tv",
    "online hard CE": "hard_ce",
    "online hard CE, rate of e2e TV": "hard_ce",
    "online soft CE": "kl",
}
RATE_OF = {"online hard CE, rate of e2e TV": "online e2e TV"}  # the other arms choose their own rate
BASELINES = ("frozen", "online e2e TV")
SWEEP_SEED = 1000


def walk(
    policies: Policies, line: Sequence[Policy], kind: str | None, *, lr: float, seed: int, args: Any
) -> list[dict[str, float]]:
    """Train a draft along policies; return the measurements at each, the first before any training.

    kind: objective; None leaves the draft as it is. Rates are chosen on the sweep's answers, with SWEEP_SEED.
    """
    drafts = Drafts(policies.model, policies.table, policies.start)
    points = []

    def steps() -> Iterator[list[Text]]:
        for number, policy in enumerate(line):
            policies.enter(policy)
            if number and kind is not None:
                order = {"seed": seed + 10 * number, "steps": args.steps, "batch": args.batch}
                yield from batches(policy.training, **order)
            points.append(drafts.measure(policy.sweep) if seed == SWEEP_SEED else measure(drafts, policy))

    if kind is None:
        list(steps())
    else:
        train(drafts, kind, steps(), lr=lr)
    return points


def split(policies: Policies, line: Sequence[Policy]) -> dict[str, dict[str, float]]:
    """Split the change of the frozen draft's first acceptance along a line, by rule: entropy and mismatch."""
    drafts = Drafts(policies.model, policies.table, policies.start)
    ends = []
    for policy in (line[0], line[-1]):
        policies.enter(policy)
        texts = [*policy.held_out, *policy.sweep]
        measured = [rules.contexts(drafts.layer, text, policy.head, policies.table) for text in texts]
        ends.append([one for one in measured if len(one["entropy"]) > 1])

    before, after = ({name: np.concatenate([t[name] for t in end]) for name in end[0]} for end in ends)
    moved = after["entropy"].mean() - before["entropy"].mean()
    by_rule = {}
    for rule in ("rejection", "target-only"):
        x, y = ([text[name] for text in ends[0]] for name in ("entropy", rule))
        slope = rules.slopes(x, y, np.ones((1, len(x))))["within"][0]
        change = after[rule].mean() - before[rule].mean()
        parts = {"change": change, "entropy": slope * moved, "mismatch": change - slope * moved}
        by_rule[rule] = {name: float(value) for name, value in (parts | {"slope": slope}).items()}
    return by_rule


def summary(cells: dict[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    """Compute for each arm and figure the course, the end, the change, and paired differences at the end."""
    table: dict[str, Any] = {}
    for arm, runs in cells.items():
        table[arm] = {}
        for figure in runs[0][0]:
            values = np.array([[point[figure] for point in run] for run in runs])  # [runs, policies]
            row: dict[str, Any] = {
                "by policy": [rounded_over_seeds(column) for column in values.T],
                "change": rounded_over_seeds(values[:, -1] - values[:, 0]),
            }
            for other in BASELINES:
                if other in cells and other != arm:
                    gaps = values - np.array([[point[figure] for point in run] for run in cells[other]])
                    row[f"minus {other}"] = rounded_over_seeds(gaps[:, -1])
                    row[f"seeds to decide, minus {other}"] = seeds_to_decide(gaps[:, -1].tolist())
                    row[f"minus {other}, half way"] = rounded_over_seeds(gaps[:, len(PARTS) // 2])
            table[arm][figure] = row
    return table


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw accepted drafts under both rules, and entropies of target and drafts, along the runs."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    figure, table = Figure(figsize=(10.4, 3.6), layout="constrained"), results["table"]
    panels = {"rejection": "accepted of 3, rejection", "target_only": "accepted of 3, target-only"}
    panels |= {"draft_entropy": "entropy of the draft (nats)"}
    for axis, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for number, arm in enumerate(table):
            value, low, high = zip(*table[arm][name]["by policy"], strict=True)
            where = 100 * np.array(PARTS) + number - 2
            error = [np.subtract(value, low), np.subtract(high, value)]
            axis.errorbar(where, value, error, marker="o", ms=3, capsize=2, color=PALETTE[number], label=arm)
        if name == "draft_entropy":
            target = [point[0] for point in table["frozen"]["target_entropy"]["by policy"]]
            axis.plot(100 * np.array(PARTS), target, ":", color="0.4", label="target")
        axis.set_title(title, color=TEXT, fontsize=11)
        axis.set_xlabel("% of the way from before to after RL", color=TEXT)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(b=False)
    figure.axes[-1].legend(fontsize=8, frameon=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Run what is missing; write the results after every arm, and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm_rl"), help="has seed_0, seed_1, ...")
    parser.add_argument("--out", type=Path, default=Path("recipes/smollm_adapt/results"))
    parser.add_argument("--kept", type=Path, default=Path("runs/smollm_policies"), help="policies, cells")
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-5, 1e-4, 3e-4, 1e-3])
    parser.add_argument("--steps", type=int, default=12, help="of a draft at each policy")
    parser.add_argument("--batch", type=int, default=8, help="texts of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)

    args.out.mkdir(parents=True, exist_ok=True)
    policies = Policies(sorted(args.runs.glob("seed_*")), args.kept)
    lines = [[policies.get(run, part) for part in PARTS] for run in range(len(policies.runs))]
    results: dict[str, Any] = {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "runs": len(lines),
        "rewards": [[round(float(np.mean(p.rewards)), 3) for p in line] for line in lines],
        "rates": {},
        "ends": {},
    }

    def cell(kind: str | None, run: int, *, lr: float, seed: int) -> list[dict[str, float]]:
        name = f"{kind or 'frozen'}_lr{lr:g}_run{run}_seed{seed}.json"

        def compute() -> dict[str, Any]:
            return {"points": walk(policies, lines[run], kind, lr=lr, seed=seed, args=args)}

        points = kept(args.kept / "replay" / name, compute)["points"]
        print(f"{name}: {points[-1]['rejection']:.3f}", flush=True)
        return points

    cells: dict[str, list[list[dict[str, float]]]] = {}
    for arm, kind in ARMS.items():
        lr = 0.0
        if arm in RATE_OF:
            lr = results["rates"][RATE_OF[arm]]["lr"]
        elif kind is not None:
            tried = {
                lr: [cell(kind, run, lr=lr, seed=SWEEP_SEED)[-1]["rejection"] for run in range(len(lines))]
                for lr in args.lrs
            }
            results["rates"][arm] = choose_rate({lr: float(np.mean(ends)) for lr, ends in tried.items()})
            lr = results["rates"][arm]["lr"]
        cells[arm] = [cell(kind, run, lr=lr, seed=run) for run in range(len(lines))]
        results["ends"][arm] = [round(run[-1]["rejection"], 4) for run in cells[arm]]
        results["table"] = summary(cells)
        (args.out / "replay.json").write_text(json.dumps(results, indent=1) + "\n")

    by_run = [split(policies, line) for line in lines]
    results["split"] = {
        rule: {part: rounded_over_seeds([run[rule][part] for run in by_run]) for part in by_run[0][rule]}
        for rule in by_run[0]
    }
    (args.out / "replay.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "replay.svg")
    print(json.dumps(results["split"]))


if __name__ == "__main__":
    main()
