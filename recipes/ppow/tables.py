"""Which gradient raises a limited draft's acceptance most: exact, PPOW (plus its missing term), e2e TV, KL?

    python -m recipes.ppow.tables [--seeds 12] [--json OUT]

No language model is used: everything can be enumerated, so a result is exact except for the noise of training
itself. A world (one seed) has 8 anchors. After each anchor and each prefix of drafts the target's logits over
8 tokens are random, in part linear in 6 features of the prefix. The draft is linear in the features, so it
cannot match the target and must choose where to be wrong. It starts from 100 steps of KL on every window,
weighted by the target. Then every arm takes equally many steps, each on 8 windows of 3 tokens from each
anchor (for e2e TV and KL, on 8 texts of the target of that length). The arm `population` follows the exact
gradient by enumeration: the result of an estimator without noise.

Measured is E[accepted] per window by enumeration, under chain verification. The learning rate of each arm
(Adam) is chosen on separate worlds; the unit of every interval is the world (Student's, 95%, paired).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.runs import rounded_over_seeds
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives.exact_window import expected_speedup, log_survival
from rlpipe.drafts.objectives.ppow import group_advantages, missing_term, ppow_loss
from rlpipe.drafts.visit import expected_accepted
from rlpipe.drafts.windows.reward import window_reward
from rlpipe.drafts.windows.rollout import logprobs_of

ANCHORS, VOCAB, DEPTHS, FEATURES, GROUP = 8, 8, 3, 6, 8
START_STEPS, STEPS = 100, 150
LRS = [0.003, 0.01, 0.03]
SWEEP_SEED = 1000
CONFIG = PpowConfig(draft_cost=0.2, kl_coef=0.0, proximity=0.0)
BASELINES = ["e2e_tv", "ppow"]


class World:
    """Target and features after every prefix of drafts, by anchor, and the draft's initial weights.

    features, target: K tables [A, V**t, F or V].
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [(ANCHORS, VOCAB**t) for t in range(DEPTHS)]
        shared = torch.randn(FEATURES, VOCAB, generator=generator)
        self.features = [torch.randn(*size, FEATURES, generator=generator) for size in sizes]
        self.target = [
            (f @ shared / FEATURES**0.5 + 1.5 * torch.randn(*size, VOCAB, generator=generator)).log_softmax(
                -1
            )
            for f, size in zip(self.features, sizes, strict=True)
        ]
        self.windows = torch.cartesian_prod(*[torch.arange(VOCAB)] * DEPTHS).expand(ANCHORS, -1, -1)
        self.start = torch.zeros(FEATURES + 1, VOCAB)

        # The start of all arms: soft KL on every window, weighted by the target.
        weights = self.start.requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=0.03)
        log_p = self.logprobs(None, self.windows)
        chance = logprobs_of(log_p, self.windows).cumsum(-1)
        before = (chance - logprobs_of(log_p, self.windows)).exp() / VOCAB ** torch.arange(DEPTHS, 0, -1)
        for _ in range(START_STEPS):
            optimizer.zero_grad()
            kl = (log_p.exp() * (log_p - self.logprobs(weights, self.windows))).sum(-1)
            (before * kl).sum().div(ANCHORS).backward()
            optimizer.step()
        self.start = weights.detach()

    def logprobs(self, weights: Tensor | None, tokens: Tensor, anchors: Tensor | None = None) -> Tensor:
        """Return log-probs [A, G, K, V] before each draft token [A, G, K]; the target's if weights is None.

        anchors: [A], all of them in order by default.
        """
        rows, prefix = [], torch.zeros_like(tokens[..., 0])
        at = (torch.arange(ANCHORS) if anchors is None else anchors)[:, None]
        for depth in range(DEPTHS):
            if weights is None:
                rows.append(self.target[depth][at, prefix])
            else:
                logits = self.features[depth] @ weights[:-1] + weights[-1]
                rows.append(logits.log_softmax(-1)[at, prefix])
            prefix = prefix * VOCAB + tokens[..., depth]
        return torch.stack(rows, 2)

    def sampled(
        self,
        weights: Tensor | None,
        generator: torch.Generator,
        anchors: Tensor | None = None,
        *,
        group: int = GROUP,
    ) -> Tensor:
        """Sample tokens [A, G, K] from the draft, or from the target if weights is None."""
        count = ANCHORS if anchors is None else len(anchors)
        tokens = torch.zeros(count, group, DEPTHS, dtype=torch.int64)
        with torch.no_grad():
            for depth in range(DEPTHS):
                probs = self.logprobs(weights, tokens, anchors)[:, :, depth].exp().flatten(0, 1)
                tokens[..., depth] = torch.multinomial(probs, 1, generator=generator).view(count, group)
        return tokens

    def accepted(self, weights: Tensor) -> Tensor:
        """Compute E[accepted] per window, over all windows of all anchors; differentiable."""
        log_q, log_p = self.logprobs(weights, self.windows), self.logprobs(None, self.windows)
        log_q, log_p = logprobs_of(log_q, self.windows), logprobs_of(log_p, self.windows)
        survival = log_survival(log_p - log_q, block=False).exp().sum(-1)
        return (log_q.sum(-1).exp() * survival).sum() / ANCHORS


def exact_window(world: World, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return minus the expected speed-up of sampled windows, with its exact gradient."""
    tokens = world.sampled(weights, generator)
    log_q, log_p = world.logprobs(weights, tokens), world.logprobs(None, tokens)
    return -expected_speedup(log_q, log_p, tokens, draft_cost=CONFIG.draft_cost, block=False).mean()


def ppow(world: World, weights: Tensor, generator: torch.Generator, *, exact: bool = False) -> Tensor:
    """Return PPOW's loss without KL and R_dist, with sampled coins; exact: adds PPOW's missing term."""
    tokens = world.sampled(weights, generator)
    log_q, log_p = world.logprobs(weights, tokens), world.logprobs(None, tokens)
    accept = (logprobs_of(log_p, tokens) - logprobs_of(log_q.detach(), tokens)).clamp(max=0).exp()
    coins = torch.rand(accept.shape, generator=generator)
    rules = {"draft_cost": CONFIG.draft_cost, "proximity": 0.0, "tolerance": 1.0}
    accepted, gap = (coins < accept).cumprod(-1).sum(-1), torch.zeros(accept.shape[:2])
    rewards = window_reward(accepted, gap, **rules)
    loss, _ = ppow_loss(
        log_q.flatten(0, 1),
        log_p.flatten(0, 1),
        tokens.flatten(0, 1),
        behaviour_logprobs=logprobs_of(log_q.detach(), tokens).flatten(0, 1),
        advantages=group_advantages(rewards).flatten(),
        clip=CONFIG.clip,
        kl_coef=0.0,
    )
    if exact:
        cost = CONFIG.draft_cost
        term = missing_term(log_q, log_p, tokens, rewards=rewards, gap=gap, draft_cost=cost, config=CONFIG)
        loss = loss - term.mean() / DEPTHS
    return loss


def e2e_tv(world: World, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return minus the sum of products of overlaps along texts of the target (Bebop Eq. 13)."""
    tokens = world.sampled(None, generator)
    log_q, log_p = world.logprobs(weights, tokens), world.logprobs(None, tokens)
    alpha = torch.minimum(log_q, log_p).exp().sum(-1).flatten(0, 1)
    return -expected_accepted(alpha, alpha, torch.ones_like(alpha)).mean()


def kl(world: World, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return KL(target || draft) along texts of the target."""
    tokens = world.sampled(None, generator)
    log_q, log_p = world.logprobs(weights, tokens), world.logprobs(None, tokens)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


ARMS: dict[str, Callable[[World, Tensor, torch.Generator], Tensor]] = {
    "population": lambda world, weights, _: -world.accepted(weights),
    "exact_window": exact_window,
    "ppow_exact": lambda world, weights, generator: ppow(world, weights, generator, exact=True),
    "e2e_tv": e2e_tv,
    "ppow": ppow,
    "kl": kl,
}


def train(world: World, arm: str, lr: float, seed: int) -> float:
    """Return E[accepted] after the steps of an arm."""
    weights, generator = world.start.clone().requires_grad_(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([weights], lr=lr)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ARMS[arm](world, weights, generator).backward()
        optimizer.step()
    with torch.no_grad():
        return world.accepted(weights).item()


def study(arms: Sequence[str], *, seeds: int, sweep_seeds: int) -> dict[str, Any]:
    """Choose a learning rate for each arm, train every arm in every world, and compare them."""
    sweep = {seed: World(seed) for seed in range(SWEEP_SEED, SWEEP_SEED + sweep_seeds)}
    worlds = {seed: World(seed) for seed in range(seeds)}
    start = [world.accepted(world.start).item() for world in worlds.values()]
    results: dict[str, Any] = {"start": sum(start) / seeds, "arms": {}}
    values: dict[str, list[float]] = {}
    for arm in arms:
        tried = {lr: sum(train(w, arm, lr, s) for s, w in sweep.items()) / len(sweep) for lr in LRS}
        best = max(tried, key=tried.__getitem__)
        values[arm] = [train(world, arm, best, seed) for seed, world in worlds.items()]
        results["arms"][arm] = {
            "lr": best,
            "edge": best in (LRS[0], LRS[-1]),
            "sweep": {f"{lr:g}": round(v, 4) for lr, v in tried.items()},
            "mean": round(sum(values[arm]) / seeds, 4),
            "gain": rounded_over_seeds([v - s for v, s in zip(values[arm], start, strict=True)]),
            "by_seed": [round(v, 4) for v in values[arm]],
        }
    for arm, row in results["arms"].items():
        for other in BASELINES:
            if other != arm and other in values:
                pairs = zip(values[arm], values[other], strict=True)
                row[f"minus {other}"] = rounded_over_seeds([a - b for a, b in pairs])
    return results


def markdown(results: dict[str, Any]) -> str:
    """Format the table, best arm first."""
    lines = ["| arm | lr | E[accepted] | minus e2e_tv | minus ppow |", "|---|---|---|---|---|"]
    for arm, row in sorted(results["arms"].items(), key=lambda item: -item[1]["mean"]):
        gaps = [row.get(f"minus {other}") for other in BASELINES]
        cells = ["–" if g is None else f"{g[0]:+.3f} [{g[1]:+.3f}, {g[2]:+.3f}]" for g in gaps]
        lr = f"{row['lr']:g}{' (edge)' if row['edge'] else ''}"
        lines.append(f"| {arm} | {lr} | {row['mean']:.3f} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| start | | {results['start']:.3f} | | |", ""])


def main() -> None:
    """Run the study; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--sweep-seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    results = study(args.arms, seeds=args.seeds, sweep_seeds=args.sweep_seeds)
    results["settings"] = {"arms": args.arms, "seeds": args.seeds, "sweep_seeds": args.sweep_seeds}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
