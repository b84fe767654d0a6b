"""How far from SmolLM2's current policy is a stale policy after each correction? Computed exactly.

    python -m recipes.smollm_adapt.replay
    python -m recipes.jackpot.smollm [--runs runs/smollm_rl] [--out recipes/jackpot]

The rollout's distribution q is a policy some updates before the end of a run of smollm_rl; the target's
distribution p is the last policy (`recipes.smollm_adapt.policies`). At each token of q's answers both
distributions are known over the whole vocabulary. A correction accepts a sampled token x with probability
a(x) and weights it by w(x). So instead of p, the loss sees the measure

    m(x) = q(x) a(x) w(x),    M = sum_x m(x)

    none             a = 1,               w = 1
    coin only        a = Z,               w = 1                          a control: masks as many tokens
    TIS              a = 1,               w = min(p / q, 2)
    TIS, bound 3     a = 1,               w = min(p / q, 3)              a control: the bound of OBRS
    masking only     a = min(1, p / q),   w = 1
    reweighting only a = 1,               w = min(Z max(1, p / q), 3)
    OBRS             a = min(1, p / q),   w = min(Z max(1, p / q), 3)    Jackpot Eq. 3, 5; Z = sum min(p, q)

`bias` is the total variation between m / M and p: the largest error of the loss at a context if advantages
differ by at most one. `share` is M^2 / sum q a w^2: the number of tokens of p that a sampled token is worth.
`uneven` is the standard deviation of M over contexts divided by its mean; M is the weight of a context. No
learning is measured. The unit of every interval is the RL run (Student's, 95%). Writes smollm.json and
smollm.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.runs import rounded_over_seeds
from recipes.smollm_adapt.policies import Policies
from recipes.smollm_adapt.texts import Text
from rlpipe.algo.obrs import acceptance, kl, reweight

AGES = {20: 0.5, 40: 0.0}  # age in updates -> position of the policy along the run
TIS, C1 = 2.0, 3.0  # bounds, the defaults of rlpipe


def corrections(log_p: Tensor, log_q: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for each correction, a and w of every token, [N, V] each."""
    z = torch.minimum(log_p, log_q).exp().sum(-1, keepdim=True)
    accept, one = acceptance(log_p, log_q, 1.0), torch.ones_like(log_p)
    weight = reweight(log_p, log_q, z=z, lam=1.0).clamp(max=C1)
    return {
        "none": (one, one),
        "coin only": (z.expand_as(log_p), one),
        "TIS": (one, (log_p - log_q).exp().clamp(max=TIS)),
        f"TIS, bound {C1:g}": (one, (log_p - log_q).exp().clamp(max=C1)),
        "masking only": (accept, one),
        "reweighting only": (one, weight),
        "OBRS": (accept, weight),
    }


def measure(log_p: Tensor, log_q: Tensor) -> dict[str, dict[str, Tensor]]:
    """Compute bias, share and mass M of each correction at each context, [N] each; float64."""
    p, q = log_p.exp(), log_q.exp()
    table = {}
    for name, (a, w) in corrections(log_p, log_q).items():
        m = q * a * w
        mass = m.sum(-1)
        table[name] = {
            "bias": (m / mass[:, None] - p).abs().sum(-1) / 2,
            "share": mass.square() / (m * w).sum(-1),
            "mass": mass,
        }
    return table


def contexts(texts: Sequence[Text], again: Sequence[Text], heads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield log p and log q [n, V] of each answer, at the positions that predict a sampled token.

    texts, again: the same answers, read by q and by p. heads: the output heads of q and of p.
    """
    for text, other in zip(texts, again, strict=True):
        before = text.sampled[1:].nonzero().flatten()
        states = other.hidden[before], text.hidden[before]
        yield [
            F.linear(state, head).double().log_softmax(-1)
            for state, head in zip(states, reversed(heads), strict=True)
        ]


def of_run(policies: Policies, run: int, age: int) -> dict[str, Any]:
    """Compute the means over the contexts of a run's answers at an age."""
    stale, last = policies.get(run, AGES[age]), policies.get(run, 1.0)
    again = policies.reread(run, AGES[age])
    distances, rows = [], []
    for log_p, log_q in contexts(stale.training, again, [stale.head, last.head]):
        distances.append(kl(log_p, log_q))
        rows.append(measure(log_p, log_q))

    found: dict[str, Any] = {"kl": torch.cat(distances).mean().item()}
    for name in rows[0]:
        columns = {key: torch.cat([row[name][key] for row in rows]) for key in rows[0][name]}
        mass = columns.pop("mass")
        found[name] = {key: value.mean().item() for key, value in columns.items()}
        found[name] |= {"uneven": (mass.std() / mass.mean()).item(), "masked": 0.0}
    accepted = torch.cat([row["masking only"]["mass"] for row in rows]).mean().item()
    for name in ("coin only", "masking only", "OBRS"):
        found[name]["masked"] = 1 - accepted
    return found


def summary(by_age: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compute means over runs, and differences from OBRS, with intervals."""
    table: dict[str, Any] = {}
    for age, runs in by_age.items():
        table[str(age)] = {"kl": rounded_over_seeds([run["kl"] for run in runs])}
        for name in (key for key in runs[0] if key != "kl"):
            row = {}
            for figure in runs[0][name]:
                values = [run[name][figure] for run in runs]
                row[figure] = rounded_over_seeds(values)
                if name != "OBRS":
                    gaps = [v - run["OBRS"][figure] for v, run in zip(values, runs, strict=True)]
                    row[f"{figure}, minus OBRS"] = rounded_over_seeds(gaps)
            table[str(age)][name] = row
    return table


def draw(table: dict[str, Any], out: Path) -> None:
    """Plot each correction's bias against its share, by age."""
    from matplotlib.figure import Figure

    from recipes.runs import save
    from rlpipe.report.png import PALETTE

    figure = Figure(figsize=(6.4, 3.8))
    axis = figure.subplots()
    names = [name for name in next(iter(table.values())) if name != "kl"]
    for name, colour in zip(names, PALETTE, strict=False):
        points = [(row[name]["bias"][0], row[name]["share"][0]) for row in table.values()]
        axis.plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, label=name)
    axis.set_xlabel(f"bias: total variation to the target, {', '.join(table)} updates old")
    axis.set_ylabel("share of tokens that they are worth")
    save(figure, out, fontsize=8)


def main() -> None:
    """Measure, write the results, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm_rl"), help="has seed_0, seed_1, ...")
    parser.add_argument("--kept", type=Path, default=Path("runs/smollm_policies"), help="of `replay`")
    parser.add_argument("--out", type=Path, default=Path("recipes/jackpot"))
    args = parser.parse_args()
    torch.set_num_threads(1)

    policies = Policies(sorted(args.runs.glob("seed_*")), args.kept)
    runs = range(len(policies.runs))
    table = summary({age: [of_run(policies, run, age) for run in runs] for age in AGES})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "smollm.json").write_text(json.dumps({"runs": len(runs), "by age": table}, indent=1) + "\n")
    draw(table, args.out / "smollm.svg")
    for age, row in table.items():
        print(age, row["kl"], {name: row[name]["bias"] for name in row if name != "kl"})


if __name__ == "__main__":
    main()
