"""How much speed is lost by choosing rule and gamma from a few answers, of the same domain or of another?

    python -m recipes.smollm_adapt.advice [--texts 16] [--out recipes/smollm_adapt/results/advice.json]

Four domains are tasks of `recipes.smollm_rl`, four are kinds of prompts that the shipped layer never saw
(maths, code, translation, HTML). In each, the model answers held-out prompts at temperature 1. The accepted
drafts of every rule and gamma are then exact in expectation (`rules`). Speed over decoding without drafts is

    (1 + accepted drafts of gamma) / c(batch, gamma)

with the costs c of a step that `scripts/bench/drafts_pay.py` measured on two cores. The costs are assumed to
be the same for all rules and for any length of answers. Half of a domain's answers, sampled at random,
represent what a user has measured. The other half gives the speed of the choice, and of the best choice. The
regret, the share of speed lost, is reported for these choices:

    here        rule (rejection, block, target-only) and gamma (0 to 3) by the measured half of this domain
    elsewhere   rule and gamma by the measured halves of all other domains
    default     rejection with gamma 3
    never       no drafts

Regrets are means over SPLITS random halves; the unit of every interval is the domain (Student's, 95%).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.runs import rounded_over_seeds
from recipes.smollm_adapt.policies import Policies, answer, prompts_of
from recipes.smollm_adapt.rules import contexts
from recipes.smollm_adapt.texts import OUT_OF_DOMAIN, read
from recipes.smollm_rl.make_layer import Layer
from recipes.smollm_rl.prompts import UNSCORED
from recipes.smollm_rl.tasks import TASKS

RULES, GAMMAS, SPLITS = ("rejection", "block", "target-only"), (0, 1, 2, 3), 200
WAYS = ("here", "elsewhere", "default", "never")
COSTS = Path("scripts/bench/results/drafts_pay.json")


def step_costs(result: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return by batch the time of a step with 0 to 3 drafts, divided by the time of a step without.

    result: a result of drafts_pay. It has the acceptance a for which 1 + a + ... + a^gamma equals that cost.
    """
    costs: dict[int, list[float]] = {}
    for batch in result["config"]["batches"]:
        needed = [result["break_even_acceptance"][f"batch {batch}, gamma {gamma}"] for gamma in GAMMAS[1:]]
        costs[batch] = [1.0, *(sum(a**k for k in range(g + 1)) for g, a in enumerate(needed, 1))]
    return costs


def lengths(answers: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return tokens per step, summed over the contexts of each answer: [answers, RULES, GAMMAS + 1].

    The last column is the number of contexts.
    """
    rows = []
    for one in answers:
        count = len(one["entropy"])
        reach = np.stack([one[f"{rule}, reach"].sum(0) for rule in RULES])  # [RULES, 3]
        first = np.zeros((len(RULES), 1))
        tokens = count + np.concatenate([first, reach.cumsum(1)], 1)
        rows.append(np.concatenate([tokens, first + count], 1))
    return np.stack(rows)


def speeds(sums: np.ndarray, costs: list[float]) -> np.ndarray:
    """Return the speed of every rule and gamma, [RULES, GAMMAS]; sums: of answers, [RULES, GAMMAS + 1]."""
    return sums[:, :-1] / sums[:, -1:] / np.array(costs)


def regrets(domains: Mapping[str, np.ndarray], costs: list[float]) -> dict[str, dict[str, float]]:
    """Return by domain and kind of choice the mean share of speed lost, and the best speed."""
    rng = np.random.default_rng(0)
    table: dict[str, dict[str, float]] = {name: dict.fromkeys((*WAYS, "best speed"), 0.0) for name in domains}
    for _ in range(SPLITS):
        halves = {}
        for name, rows in domains.items():
            order = rng.permutation(len(rows))
            parts = order[: len(rows) // 2], order[len(rows) // 2 :]
            halves[name] = [rows[part].sum(0) for part in parts]

        for name, (measured, rest) in halves.items():
            others = sum(half[0] for other, half in halves.items() if other != name)
            actual = speeds(rest, costs)
            choices = {
                "here": np.unravel_index(speeds(measured, costs).argmax(), actual.shape),
                "elsewhere": np.unravel_index(speeds(others, costs).argmax(), actual.shape),
                "default": (0, len(GAMMAS) - 1),
                "never": (0, 0),
            }
            for way, choice in choices.items():
                table[name][way] += (1 - actual[choice] / actual.max()) / SPLITS
            table[name]["best speed"] += actual.max() / SPLITS
    return table


def summary(domains: Mapping[str, np.ndarray], costs: Mapping[int, list[float]]) -> dict[str, Any]:
    """Compute regrets by batch, for each domain and, with intervals, over domains."""
    found: dict[str, Any] = {}
    for batch, cost in costs.items():
        table = regrets(domains, cost)
        row: dict[str, Any] = {way: rounded_over_seeds([one[way] for one in table.values()]) for way in WAYS}
        for way in WAYS[1:]:
            gaps = [one[way] - one["here"] for one in table.values()]
            row[f"{way} minus here"] = rounded_over_seeds(gaps)
        row["domains"] = {name: {k: round(v, 4) for k, v in one.items()} for name, one in table.items()}
        found[str(batch)] = row
    return found


def main() -> None:
    """Sample answers, measure, choose, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("recipes/smollm_adapt/results/advice.json"))
    parser.add_argument("--texts", type=int, default=16, help="answers of each domain (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    policies = Policies([], Path())
    layer, head = (
        Layer(policies.model, policies.start),
        policies.model.get_output_embeddings().weight.detach(),
    )
    tasks = TASKS | {name: UNSCORED[name] for name in OUT_OF_DOMAIN}
    domains, entropies = {}, {}
    for number, (name, task) in enumerate(tasks.items()):
        prompts = prompts_of({name: task}, args.texts, held_out=True, seed=number)
        answers = answer(policies.before, prompts, seed=1000 * number)
        texts = read(policies.model, [one["sample"] for one in answers])
        measured = [contexts(layer, text, head, policies.table) for text in texts]
        measured = [one for one in measured if len(one["entropy"])]
        domains[name] = lengths(measured)
        entropies[name] = round(float(np.concatenate([one["entropy"] for one in measured]).mean()), 3)
        print(name, entropies[name], (domains[name].sum(0)[:, :-1] / domains[name].sum(0)[:, -1:]).round(3))

    results = {
        "answers": {name: len(rows) for name, rows in domains.items()},
        "entropy": entropies,
        "tokens per step": {
            name: {
                rule: (row[:-1] / row[-1]).round(4).tolist()
                for rule, row in zip(RULES, rows.sum(0), strict=True)
            }
            for name, rows in domains.items()
        },
        "batches": summary(domains, step_costs(json.loads(COSTS.read_text()))),
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    for batch, row in results["batches"].items():
        print(batch, {way: row[way] for way in WAYS})


if __name__ == "__main__":
    main()
