"""Study a draft during RL, frozen or trained, in enumerable worlds (Bebop Fig. 2, 4, 6, 9a, 10 and 11).

    python -m recipes.mtp_adapt.worlds [--worlds 12] [--json recipes/mtp_adapt/results/worlds.json]

No language model is used, so every acceptance is exact. A world has 8 anchors for the policy to learn on and
8 others. There is a hidden state for each anchor and prefix; a prefix has at most two tokens from a
vocabulary of 6. The policy is a head on this state plus separate logits. The draft is a head on half of the
state: it cannot match the policy, but it follows when RL moves the states, as an MTP layer does. RL raises
the probability of a few right tokens by its exact gradient, and entropy falls. Drafts do not affect the
policy's gradient, so the policy is the same in all arms.

objectives  each objective takes equally many steps from one start, on texts of the policy before RL; measured
            are the accepted drafts of a window of three, on training anchors (in domain) and on the others
rl          starts from the drafts trained by e2e TV and by KL; each is frozen, or updated at every RL step by
            e2e TV or hard labels

Reported for each draft: accepted drafts under rejection and target-only, acceptance by depth, and the values
of Bebop's Fig. 10 and 11 (`rlpipe.drafts.loss.stats`). Worlds run side by side in one tensor. The unit of
every interval is the world (Student's, 95%, paired).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.runs import rounded_over_seeds
from recipes.theory import entropy
from rlpipe.drafts.loss import mtp_loss

HALF, VOCAB, DEPTHS, HIDDEN, SEEN = 8, 6, 3, 10, 5
RIGHT = 2  # tokens that RL rewards at each position
STEPS, LR = 100, 0.02  # of an objective
RL_STEPS, RL_LR, RL_EVERY = 120, 0.3, 10
BATCH = 8  # texts of each anchor and step
OBJECTIVES = ("hard_ce", "kl", "reverse_kl", "tv", "e2e_tv")
WINDOWS = torch.cartesian_prod(*[torch.arange(VOCAB)] * DEPTHS)  # [V^K, K]


class World:
    """S worlds: the policy's hidden states after every prefix, which RL moves, and the fixed parts.

    The anchors of all worlds are in one row; in each world, HALF anchors in domain come before the HALF
    others. states: K tables [anchors, V^t, H].
    """

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.count = count
        self.world_of = torch.arange(count).repeat_interleave(2 * HALF)
        sizes = [(len(self.world_of), VOCAB**t) for t in range(DEPTHS)]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.generator)

        self.head = normal(count, HIDDEN, VOCAB) / HIDDEN**0.5
        self.states = [normal(*size, HIDDEN) for size in sizes]
        self.own = [normal(*size, VOCAB) / 2 for size in sizes]
        order = [torch.rand(*size, VOCAB, generator=self.generator).argsort(-1) for size in sizes]
        self.right = [(x < RIGHT).float() for x in order]

    def anchors(self, domain: int) -> Tensor:
        """Return the anchors of all worlds that are in domain (0), or the others (1)."""
        return torch.arange(len(self.world_of)).view(self.count, 2, HALF)[:, domain].flatten()

    def policy(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Return log-probabilities after every prefix."""
        head, pairs = self.head[self.world_of], zip(states, self.own, strict=True)
        return [(state @ head + own).log_softmax(-1) for state, own in pairs]

    def draft(self, states: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Return the draft's logits after every prefix; weights: [S, SEEN + 1, V]."""
        head = weights[self.world_of]
        return [state[..., :SEEN] @ head[:, :-1] + head[:, -1:] for state in states]


def along(tables: Sequence[Tensor], tokens: Tensor, anchors: Tensor) -> Tensor:
    """Return the row that precedes each token: tokens [N, K] and anchors [N] -> [N, K, V]."""
    rows, prefix = [], torch.zeros_like(anchors)
    for depth, table in enumerate(tables):
        rows.append(table[anchors, prefix])
        prefix = prefix * VOCAB + tokens[:, depth]
    return torch.stack(rows, 1)


def everything(world: World, domain: int) -> tuple[Tensor, Tensor]:
    """Return all windows of all anchors of a domain: tokens [N, K], anchors [N], world by world."""
    anchors = world.anchors(domain)
    return WINDOWS.repeat(len(anchors), 1), anchors.repeat_interleave(len(WINDOWS))


def measure(world: World, states: Sequence[Tensor], weights: Tensor, domain: int) -> dict[str, Tensor]:
    """Compute all figures of a draft, exactly: [S] each."""
    tokens, anchors = everything(world, domain)
    with torch.no_grad():
        log_p = along(world.policy(states), tokens, anchors)
        log_q = along(world.draft(states, weights), tokens, anchors).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    p_x, q_x = (x.gather(-1, tokens[..., None])[..., 0] for x in (p, q))

    # The probability that exactly these drafts are accepted, once for each prefix of an anchor.
    copies = HALF * VOCAB ** torch.arange(DEPTHS - 1, -1, -1)
    accepted = torch.minimum(p_x, q_x).cumprod(-1) / copies
    reach = accepted.view(world.count, -1, DEPTHS).sum(1)
    greedy = (tokens == log_q.argmax(-1)).float().cumprod(-1) * p_x.cumprod(-1) / copies

    # Bebop's figures show values of the first draft of each anchor.
    above, below = p[:, 0] > q[:, 0], q[:, 0] > p[:, 0]
    figures = {
        "alpha": torch.minimum(p, q)[:, 0].sum(-1),
        "alpha q>p": (p[:, 0] * below).sum(-1),
        "alpha p>q": (q[:, 0] * above).sum(-1),
        "entropy": entropy(p[:, 0]),
        "entropy gap": entropy(q[:, 0]) - entropy(p[:, 0]),
        "kl": (p * (log_p - log_q))[:, 0].sum(-1),
        "reverse kl": (q * (log_q - log_p))[:, 0].sum(-1),
    }
    found = {name: value.view(world.count, -1).mean(1) for name, value in figures.items()}
    found |= {"rejection": reach.sum(-1), "target-only": greedy.view(world.count, -1).sum(1)}
    given = torch.cat((torch.ones_like(reach[:, :1]), reach[:, :-1]), 1)
    return found | {f"depth {k}": x for k, x in enumerate((reach / given).unbind(1), 1)}


def texts(world: World, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample BATCH texts of the policy from each anchor in domain."""
    anchors = world.anchors(0).repeat_interleave(BATCH)
    tokens = torch.zeros(len(anchors), DEPTHS, dtype=torch.int64)
    tables = world.policy(states)
    for depth in range(DEPTHS):
        probs = along(tables, tokens, anchors)[:, depth].exp()
        tokens[:, depth] = torch.multinomial(probs, 1, generator=world.generator)[:, 0]
    return tokens, anchors


class Learner:
    """A draft that learns from texts of the policy, by one objective."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights.clone().requires_grad_()
        self._optimizer = torch.optim.Adam([self.weights], lr=LR)

    def step(self, world: World, states: Sequence[Tensor], kind: str, batch: tuple[Tensor, Tensor]) -> None:
        """Take one step on (tokens, anchors)."""
        tokens, anchors = batch
        draft = along(world.draft(states, self.weights), tokens, anchors)
        with torch.no_grad():
            target = along(world.policy(states), tokens, anchors)
        mask = torch.ones(tokens.shape, dtype=torch.bool)
        loss, _ = mtp_loss(kind, draft, target, mask=mask, tokens=tokens)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def learn_policy(world: World, states: Sequence[Tensor]) -> list[Tensor]:
    """Take an RL step: the exact gradient of the probability of a right token, at every prefix in domain."""
    leaves = [state.clone().requires_grad_() for state in states]
    pairs = zip(world.policy(leaves), world.right, strict=True)
    inside = world.anchors(0)
    value = torch.stack([(log_p.exp() * right)[inside].sum() for log_p, right in pairs]).sum()
    steps = zip(leaves, torch.autograd.grad(value, leaves), strict=True)
    return [(leaf + RL_LR * gradient).detach() for leaf, gradient in steps]


def objectives(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train every objective from one start; return the drafts, and their figures over the steps."""
    drafts, found = {}, {}
    warm = Learner(torch.zeros(world.count, SEEN + 1, VOCAB))
    for _ in range(STEPS // 5):
        warm.step(world, world.states, "kl", texts(world, world.states))
    for kind in OBJECTIVES:
        learner, curve = Learner(warm.weights.detach()), []
        for step in range(STEPS + 1):
            if step % (STEPS // 5) == 0:
                curve.append([measure(world, world.states, learner.weights, domain) for domain in (0, 1)])
            learner.step(world, world.states, kind, texts(world, world.states))
        drafts[kind] = learner.weights.detach()
        found[kind] = curve
    return drafts, found


ONLINE = {  # start and online objective
    "TV, frozen": ("e2e_tv", None),
    "TV, online TV": ("e2e_tv", "e2e_tv"),
    "TV, online CE": ("e2e_tv", "hard_ce"),
    "CE, frozen": ("kl", None),
    "CE, online CE": ("kl", "hard_ce"),
}


def rl(world: World, drafts: dict[str, Tensor]) -> dict[str, list[dict[str, Tensor]]]:
    """Train the policy, and the drafts that learn; return figures over the steps."""
    states = [state.clone() for state in world.states]
    learners = {name: Learner(drafts[start]) for name, (start, _) in ONLINE.items()}
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in ONLINE}
    for step in range(RL_STEPS + 1):
        batch = texts(world, states)
        for name, (_, kind) in ONLINE.items():
            if step % RL_EVERY == 0:
                found[name].append(measure(world, states, learners[name].weights, 0))
            if kind is not None:
                learners[name].step(world, states, kind, batch)
        states = learn_policy(world, states)
    return found


def summary(curves: dict[str, Any], runs: dict[str, Any]) -> dict[str, Any]:
    """Compute means over worlds, and the differences that the paper reports, with intervals."""
    table: dict[str, Any] = {"objectives": {}, "rl": {}}
    for kind, curve in curves.items():
        row: dict[str, Any] = {}
        for domain, where in enumerate(("in domain", "out of domain")):
            for name, value in curve[-1][domain].items():
                row[f"{where}, {name}"] = rounded_over_seeds(value)
                if kind != "kl":
                    row[f"{where}, {name}, minus kl"] = rounded_over_seeds(
                        value - curves["kl"][-1][domain][name]
                    )
        depths = [[point[0][f"depth {k}"].mean().item() for k in (1, 2, 3)] for point in curve]
        row["acceptance by step and depth"] = np.round(depths, 4).tolist()
        table["objectives"][kind] = row

    for name, run in runs.items():
        row = {}
        for figure in run[0]:
            values = torch.stack([point[figure] for point in run])  # [points, S]
            row[figure] = {
                "over steps": [round(x, 4) for x in values.mean(1).tolist()],
                "end": rounded_over_seeds(values[-1]),
                "change": rounded_over_seeds(values[-1] - values[0]),
            }
            for other in ("TV, frozen", "TV, online TV"):
                if other != name:
                    row[figure][f"end minus {other}"] = rounded_over_seeds(
                        values[-1] - runs[other][-1][figure]
                    )
        table["rl"][name] = row
    return table | {"correlations": correlations(curves)}


def correlations(curves: dict[str, Any]) -> dict[str, float]:
    """Correlate the values of Bebop's Fig. 10 over all drafts, in and out of domain, before RL."""
    ends = [curve[-1][domain] for curve in curves.values() for domain in (0, 1)]
    columns = {name: torch.cat([end[name] for end in ends]).numpy() for name in ends[0]}
    names = ("entropy gap", "kl", "reverse kl")
    found = {name: float(np.corrcoef(columns[name], columns["alpha"])[0, 1]) for name in names}
    return {name: round(value, 3) for name, value in found.items()} | {"drafts": len(columns["alpha"])}


def main() -> None:
    """Run the study; print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)

    world = World(args.worlds)
    drafts, curves = objectives(world)
    results = {"worlds": args.worlds, **summary(curves, rl(world, drafts))}
    if args.json:
        args.json.write_text(json.dumps(results) + "\n")
    for name, row in results["rl"].items():
        print(
            name,
            {f: (row[f]["over steps"][0], row[f]["end"]) for f in ("entropy", "rejection", "target-only")},
        )
    for kind, row in results["objectives"].items():
        print(kind, row["in domain, rejection"], row.get("in domain, rejection, minus kl"))
    print(results["correlations"])


if __name__ == "__main__":
    main()
