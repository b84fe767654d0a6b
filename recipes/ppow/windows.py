"""PPOW's Tables 2, 3 and 8 and Fig. 4 in the worlds of `recipes.ppow.tables`, which can be enumerated.

    python -m recipes.ppow.windows [--seeds 5] [--json recipes/ppow/windows.json]

switch      Fig. 4: even anchors, then only ADAW; reward and KL(draft || target) of the training windows
rates       Table 3, Fig. 3: equally many further steps of KL (continued supervised training), e2e TV and PPOW
            from one start, at every learning rate; E[accepted] by enumeration after a third of the steps and
            after all
candidates  Table 2: drafted windows of one anchor verified together, as a tree of chains (`verify_tree`)
hardness    Table 8: accepted drafts on windows that the starting draft has accepted in full (easy) and on the
            others (hard), with the same uniforms for every draft; and nabla = e^delta - delta - 1 of drafted
            tokens, delta = log p - log q

The unit of every interval is the world (Student's, 95%, paired).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.ppow.tables import ANCHORS, ARMS, DEPTHS, VOCAB, World
from recipes.runs import rounded_over_seeds
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives.ppow import group_advantages, ppow_loss
from rlpipe.drafts.windows.reward import proximity_gap, window_reward
from rlpipe.drafts.windows.rollout import logprobs_of
from rlpipe.drafts.windows.selection import criticality, sample_windows, window_scores
from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import verify_tree

STEPS, LRS, LR = 90, (0.003, 0.01, 0.03), 0.01
GROUPS = (1, 2, 4, 8)  # candidate windows of a step
REPEATS = 64  # windows of each anchor in sampled figures
NEAR = 20  # steps on either side of the switch
HARDNESS = ("easy, accepted", "easy, nabla", "hard, accepted", "hard, nabla")
CONFIG = PpowConfig(draft_cost=0.2, kl_coef=0.0, tolerance=3.0)  # at 1 nat hardly a window earns R_dist

PROXIMITY = {"ppow": 0.0, "ppow, R_dist": CONFIG.proximity}


def ppow_step(
    world: World, weights: Tensor, generator: torch.Generator, *, hard: float = 0.0, proximity: float = 0.0
) -> tuple[Tensor, float, float]:
    """Return PPOW's loss, and reward and KL of its windows; hard: the share of anchors chosen by score."""
    anchors = choose(world, weights, generator, hard)
    tokens = world.sampled(weights, generator, anchors)
    log_q, log_p = (world.logprobs(w, tokens, anchors) for w in (weights, None))
    q_x, p_x = (logprobs_of(x, tokens) for x in (log_q.detach(), log_p))
    coins = torch.rand(q_x.shape, generator=generator)
    accepted = (coins < (p_x - q_x).clamp(max=0).exp()).cumprod(-1).sum(-1)

    gap = proximity_gap(greedy_logprobs(world)[anchors][:, None].expand_as(p_x), p_x)
    rewards = window_reward(
        accepted, gap, draft_cost=CONFIG.draft_cost, proximity=proximity, tolerance=CONFIG.tolerance
    )
    loss, stats = ppow_loss(
        log_q.flatten(0, 1),
        log_p.flatten(0, 1),
        tokens.flatten(0, 1),
        behaviour_logprobs=q_x.flatten(0, 1),
        advantages=group_advantages(rewards).flatten(),
        clip=CONFIG.clip,
        kl_coef=0.0,
    )
    return loss, rewards.mean().item(), (stats.kl / stats.tokens).item()


def choose(world: World, weights: Tensor, generator: torch.Generator, hard: float) -> Tensor:
    """Choose anchors with replacement, by ADAW's scores of one text of the target at each: [A]."""
    with torch.no_grad():
        text = world.sampled(None, generator, group=1)
        log_q, log_p = (world.logprobs(w, text)[:, 0] for w in (weights, None))
        entropy = -(log_p.exp() * log_p).sum(-1)
        critical = criticality(entropy, (log_p.exp() * (log_p - log_q)).sum(-1), VOCAB)
        scores = window_scores(critical, DEPTHS)[:, 0]
    return sample_windows(scores, ANCHORS, hard, generator=generator)


def greedy_logprobs(world: World) -> Tensor:
    """Return the target's log-probabilities along its greedy window: [A, K]."""
    tokens = torch.zeros(ANCHORS, 1, DEPTHS, dtype=torch.int64)
    for depth in range(DEPTHS):
        tokens[..., depth] = world.logprobs(None, tokens)[:, :, depth].argmax(-1)
    return logprobs_of(world.logprobs(None, tokens), tokens)[:, 0]


def switch(world: World, seed: int) -> dict[str, list[float]]:
    """Train by PPOW on even anchors and then by ADAW only; return reward and KL of each step's windows."""
    weights, generator = world.start.clone().requires_grad_(), torch.Generator().manual_seed(seed)
    optimizer, found = torch.optim.Adam([weights], lr=LR), {"reward": [], "kl": []}
    for step in range(2 * STEPS):
        loss, reward, kl = ppow_step(world, weights, generator, hard=float(step >= STEPS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found["reward"].append(reward)
        found["kl"].append(kl)
    return found


def train(world: World, arm: str, lr: float, seed: int) -> tuple[Tensor, list[float]]:
    """Train an arm; return its weights, and E[accepted] after a third of the steps and after all steps."""
    weights, generator = world.start.clone().requires_grad_(), torch.Generator().manual_seed(seed)
    optimizer, found = torch.optim.Adam([weights], lr=lr), []
    for step in range(1, STEPS + 1):
        if arm in PROXIMITY:
            loss, _, _ = ppow_step(world, weights, generator, proximity=PROXIMITY[arm])
        else:
            loss = ARMS[arm](world, weights, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (STEPS // 3, STEPS):
            with torch.no_grad():
                found.append(world.accepted(weights).item())
    return weights.detach(), found


def chains(count: int) -> Tree:
    """Make the tree of `count` windows below one root, level by level."""
    parents = [-1] + [0] * count
    for depth in range(1, DEPTHS):
        parents += range(1 + (depth - 1) * count, 1 + depth * count)
    return Tree(tuple(parents))


def candidates(world: World, weights: Tensor, count: int, seed: int) -> float:
    """Return the mean number of accepted drafts if `count` sampled windows are verified together."""
    generator, tree = torch.Generator().manual_seed(seed), chains(count)
    anchors = torch.arange(ANCHORS).repeat_interleave(REPEATS)
    tokens = world.sampled(weights, generator, anchors, group=count)  # [B, G, K]
    rows = {}
    for name, table in (("q", weights), ("p", None)):
        found = world.logprobs(table, tokens, anchors).exp().double()  # before each draft
        after = torch.full(
            (len(anchors), count, VOCAB), 1 / VOCAB
        ).double()  # at leaves only the bonus token is read
        levels = [found[:, :1, 0], *(found[:, :, k] for k in range(1, DEPTHS)), after]
        rows[name] = torch.cat(levels, 1)
    uniforms = torch.rand(len(anchors), tree.num_drafts + 1, generator=generator, dtype=torch.float64)
    verdict = verify_tree(
        tree,
        tokens.transpose(1, 2).flatten(1),
        rows["q"],
        rows["p"],
        uniforms[:, 1:],
        uniforms[:, 0],
        replacement=True,
    )
    return verdict.num_accepted.double().mean().item()


def drafted(world: World, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draft a window for each uniform by inverse CDF and verify it: accepted [A, R], nabla [A, R].

    uniforms: [2, A, R, K], for drafts and for coins, the same for every draft model.
    """
    tokens = torch.zeros(uniforms.shape[1:], dtype=torch.int64)
    for depth in range(DEPTHS):
        cdf = world.logprobs(weights, tokens)[:, :, depth].exp().cumsum(-1)
        tokens[..., depth] = (uniforms[0, ..., depth, None] > cdf).sum(-1).clamp(max=VOCAB - 1)
    q_x, p_x = (logprobs_of(world.logprobs(w, tokens), tokens) for w in (weights, None))
    delta = p_x - q_x
    accepted = (uniforms[1] < delta.clamp(max=0).exp()).cumprod(-1).sum(-1)
    return accepted.double(), (delta.exp() - delta - 1).double().mean(-1)


def hardness(world: World, drafts: dict[str, Tensor], seed: int) -> dict[str, list[float]]:
    """Return accepted drafts and nabla of each draft over easy windows, then over hard ones."""
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(2, ANCHORS, REPEATS, DEPTHS, generator=generator)
    easy = drafted(world, world.start, uniforms)[0] == DEPTHS
    found = {}
    for name, weights in drafts.items():
        both = drafted(world, weights, uniforms)
        found[name] = [x[where].mean().item() for where in (easy, ~easy) for x in both]
    return found


def study(seeds: int) -> dict[str, Any]:
    """Run all four studies in every world, and compare."""
    found: dict[str, dict[str, list[Any]]] = {"switch": {}, "rates": {}, "candidates": {}, "hardness": {}}

    def add(part: str, name: str, value: Any) -> None:
        found[part].setdefault(name, []).append(value)

    for seed in range(seeds):
        world = World(seed)
        curve = switch(world, seed)
        for name, values in curve.items():
            parts = {"before": values[STEPS - NEAR : STEPS], "after": values[STEPS : STEPS + NEAR]}
            for when, part in (parts | {"end": values[-NEAR:]}).items():
                add("switch", f"{name}, {when}", sum(part) / NEAR)

        drafts = {"start": world.start}
        for arm in ("kl", "e2e_tv", "ppow", "ppow, R_dist"):
            for lr in LRS if arm != "ppow, R_dist" else (LR,):
                weights, accepted = train(world, arm, lr, seed)
                for when, value in zip(("third", "end"), accepted, strict=True):
                    add("rates", f"{arm}, {lr:g}, {when}", value)
                if lr == LR:
                    drafts[arm] = weights
        for name, weights in drafts.items():
            for count in GROUPS:
                add("candidates", f"{name}, {count}", candidates(world, weights, count, seed))
        for name, values in hardness(world, drafts, seed).items():
            for column, value in zip(HARDNESS, values, strict=True):
                add("hardness", f"{name}, {column}", value)
    return summary(found)


PAIRS = {
    "switch": [
        ("reward, after", "reward, before"),
        ("kl, after", "kl, before"),
        ("reward, end", "reward, after"),
    ],
    "rates": [(f"{arm}, {lr:g}, end", f"kl, {lr:g}, end") for arm in ("ppow", "e2e_tv") for lr in LRS]
    + [(f"{arm}, {lr:g}, end", f"{arm}, {lr:g}, third") for arm in ("kl", "ppow") for lr in LRS],
    "candidates": [(f"{arm}, {n}", f"start, {n}") for arm in ("ppow", "e2e_tv") for n in GROUPS],
    "hardness": [(f"ppow, R_dist, {column}", f"ppow, {column}") for column in HARDNESS],
}


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return means over worlds, and the differences that the paper reports, with intervals."""
    results: dict[str, Any] = {}
    for part, columns in found.items():
        results[part] = {name: rounded_over_seeds(values) for name, values in columns.items()}
        for one, other in PAIRS[part]:
            gaps = [a - b for a, b in zip(columns[one], columns[other], strict=True)]
            results[part][f"{one} - {other}"] = rounded_over_seeds(gaps)
    return results


def main() -> None:
    """Run the study; print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {"worlds": args.seeds, "steps": STEPS, "lr": LR, **study(args.seeds)}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
