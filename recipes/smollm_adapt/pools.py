"""Which answers should a draft be trained on after RL: all, rewarded, of undecided prompts, or old ones?

    python -m recipes.smollm_adapt.replay
    python -m recipes.smollm_adapt.pools [--runs runs/smollm_rl] [--out recipes/smollm_adapt/results]

The draft is the shipped layer, trained for the model before RL; the target is the policy at the end of a run
of smollm_rl. Every arm takes the same number of steps on the same number of answers; only the origin of the
answers differs:

    all            answers of the target itself
    rewarded       those of them with a reward
    undecided      those of them whose prompt has answers with different rewards
    visit          all, each anchor weighted by the probability that a verify step starts there
    20, 40         answers of the policies that many updates before (half of the way back, and all of it;
                   `policies`), with the target's distribution as teacher

The objective is end-to-end TV, and for the first and the last pool also hard CE, whose teacher is the text.
Learning rates are those that `replay` chose. Measured on the target's answers to held-out prompts, as in
`replay`. The last column compares with `replay`'s draft, which was trained along the way in as many steps of
the same size. The unit of every interval is the RL run (Student's, 95%, paired). Writes pools.json and the
picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from recipes.runs import kept, rounded_over_seeds, seeds_to_decide
from recipes.smollm_adapt.objectives import Drafts, batches, draw_gains, train
from recipes.smollm_adapt.policies import Policies, Policy, measure
from recipes.smollm_adapt.texts import Text

ARMS: dict[str, tuple[str, str]] = {  # objective and pool
    "frozen": ("", ""),
    "e2e TV, all": ("e2e_tv", "all"),
    "e2e TV, rewarded": ("e2e_tv", "rewarded"),
    "e2e TV, undecided": ("e2e_tv", "undecided"),
    "e2e TV, by visit": ("e2e_tv", "visit"),
    "e2e TV, 20 updates old": ("e2e_tv", "20"),
    "e2e TV, 40 updates old": ("e2e_tv", "40"),
    "hard CE, all": ("hard_ce", "all"),
    "hard CE, 40 updates old": ("hard_ce", "40"),
}
AGES = {"20": 0.5, "40": 0.0}  # age in updates -> position of the policy along the run
ONLINE = {"e2e_tv": "online e2e TV", "hard_ce": "online hard CE"}  # arms of `replay`


def choose(policy: Policy, pool: str) -> list[Text]:
    """Return the answers of a policy that a pool consists of: all (also by visit), rewarded or undecided."""
    by_prompt: dict[int, set[float]] = {}
    for prompt, reward in zip(policy.prompts, policy.rewards, strict=True):
        by_prompt.setdefault(prompt, set()).add(reward)
    taken = {
        "all": [True] * len(policy.training),
        "visit": [True] * len(policy.training),
        "rewarded": [reward > 0 for reward in policy.rewards],
        "undecided": [len(by_prompt[prompt]) > 1 for prompt in policy.prompts],
    }[pool]
    return [text for text, take in zip(policy.training, taken, strict=True) if take]


def summary(cells: dict[str, list[dict[str, Any]]], online: dict[str, list[float]]) -> dict[str, Any]:
    """Compute acceptance at the end, and paired differences from "frozen" and from all answers.

    online: accepted drafts of `replay`'s arms at the end, by objective, run by run.
    """
    table: dict[str, Any] = {}
    for arm, runs in cells.items():
        objective, _ = ARMS[arm]
        table[arm] = {"answers": [run["answers"] for run in runs]}
        for rule in ("rejection", "target_only", "out of domain"):
            values = [run[rule] for run in runs]
            others = {name: [run[rule] for run in cells[name]] for name in ("frozen", "e2e TV, all")}
            if rule == "rejection" and objective in online:
                others["online"] = online[objective]
            row: dict[str, Any] = {"mean": rounded_over_seeds(values)}
            for name, base in others.items():
                if name != arm:
                    gaps = [a - b for a, b in zip(values, base, strict=True)]
                    row[f"minus {name}"] = rounded_over_seeds(gaps)
                    row[f"seeds to decide, minus {name}"] = seeds_to_decide(gaps)
            table[arm][rule] = row
    return table


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw each arm's gain over the frozen draft, with its interval."""
    table = results["table"]
    arms = [arm for arm in reversed(table) if arm != "frozen"]
    gains = {
        rule.replace("_", "-"): [table[arm][rule]["minus frozen"] for arm in arms]
        for rule in ("rejection", "target_only")
    }
    draw_gains(arms, gains, "more drafts accepted of 3 than by the frozen draft (95% over runs)", file)


def main() -> None:
    """Run what is missing; write the results and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path("recipes/smollm_adapt/results")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm_rl"), help="has seed_0, seed_1, ...")
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--replay", type=Path, default=results / "replay.json", help="of `replay`")
    parser.add_argument("--kept", type=Path, default=Path("runs/smollm_policies"), help="policies, cells")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="texts of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)

    policies = Policies(sorted(args.runs.glob("seed_*")), args.kept)
    replay = json.loads(args.replay.read_text())
    rates = {objective: replay["rates"][arm]["lr"] for objective, arm in ONLINE.items()}

    def compute(arm: str, run: int) -> dict[str, Any]:
        (objective, pool), target = ARMS[arm], policies.get(run, 1.0)
        policies.enter(target)
        drafts, texts = Drafts(policies.model, policies.table, policies.start), []
        if objective:
            texts = policies.reread(run, AGES[pool]) if pool in AGES else choose(target, pool)
            steps = batches(texts, seed=run, steps=args.steps, batch=args.batch)
            train(drafts, objective, steps, lr=rates[objective], by_visit=pool == "visit")
        return {"answers": len(texts)} | measure(drafts, target)

    cells: dict[str, list[dict[str, Any]]] = {}
    for arm in ARMS:
        cells[arm] = []
        for run in range(len(policies.runs)):
            name = f"{arm.replace(', ', '_').replace(' ', '_')}_run{run}.json"
            cells[arm].append(kept(args.kept / "pools" / name, lambda a=arm, r=run: compute(a, r)))
            print(f"{arm}, run {run}: {cells[arm][-1]['rejection']:.3f}", flush=True)

    online = {objective: replay["ends"][arm] for objective, arm in ONLINE.items()}
    summed = {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "rates": rates,
        "table": summary(cells, online),
    }
    (args.out / "pools.json").write_text(json.dumps(summed, indent=1) + "\n")
    draw(summed, args.out / "pools.svg")


if __name__ == "__main__":
    main()
