"""A step on windows apart from the models that run: windows are drawn and judged alike for any drafter.

Owns the randomness and the verdict on drafted windows; the algorithm is
`rlpipe.drafts.ppow`'s, verification `rlpipe.spec.verify`'s. Who drafts and how the target reads the drafts:
`rlpipe.trainer.ppow` for an MTP layer, `rlpipe.drafts.ppow.eagle3` for an EAGLE-3 draft.

Nothing is random but what (seed, step, trajectory) gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.ppow import (
    expected_reward,
    proximity_gap,
    sample_windows,
    window_reward,
)
from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import verify_chain


@dataclass(slots=True, kw_only=True)
class Drawn:
    """W windows, and what is random about the G that are drafted from each.

    owners: [W] row of the micro-batch, ascending. turns, columns: [W] where each anchor stands among the
    turns. scores: [W]. draft_uniforms, coins: [W, G, K] float64, on the CPU.
    """

    owners: np.ndarray
    turns: np.ndarray
    columns: np.ndarray
    scores: torch.Tensor
    draft_uniforms: torch.Tensor
    coins: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Judged:
    """logprobs: [W, G, K, V] of the target where each draft was drawn. The rest [W, G].

    rewards: those of the objective. close: nothing accepted and yet R_dist earned.
    """

    logprobs: torch.Tensor
    num_accepted: torch.Tensor
    rewards: torch.Tensor
    close: torch.Tensor


def draw_windows(
    scores: torch.Tensor,
    whole: torch.Tensor,
    owners: np.ndarray,
    rows: np.ndarray,
    config: PpowConfig,
    *,
    hard: float,
    depths: int,
    seed: int,
    step: int,
) -> Drawn:
    """`ppow.windows` windows of each trajectory that has any, a share `hard` of them by score.

    scores: [R, S >= 1] of the window at each anchor of R turns. whole: [R, >= S] bool, all drafts of the
    window lie within the turn; some do. owners: [R] row of the micro-batch each turn is of. rows: number of
    each row's trajectory in the batch, which with seed and step settles its randomness. On the CPU.
    """
    cells, owned, chosen, uniforms = [], [], [], []
    for owner in np.unique(owners):
        mine = whole[:, : scores.shape[1]] & torch.from_numpy(owners == owner)[:, None]
        if not mine.any():
            continue
        generator = _generator(seed, step, int(rows[owner]))
        drawn = sample_windows(scores[mine], config.windows, hard, generator)
        cells.append(mine.nonzero()[drawn].numpy())
        owned += [owner] * len(drawn)
        chosen.append(scores[mine][drawn])
        size = (2, len(drawn), config.group_size, depths)
        uniforms.append(torch.rand(size, generator=generator, dtype=torch.float64))
    turns, columns = np.concatenate(cells).T
    draft_uniforms, coins = torch.cat(uniforms, 1)
    return Drawn(
        owners=np.array(owned),
        turns=turns,
        columns=columns,
        scores=torch.cat(chosen),
        draft_uniforms=draft_uniforms,
        coins=coins,
    )


def judge_windows(
    tokens: torch.Tensor,
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    coins: torch.Tensor,
    greedy: torch.Tensor | None,
    config: PpowConfig,
    draft_cost: float,
) -> Judged:
    """Verification of W windows of G siblings with K drafts each, and what they earn.

    tokens: [W, G, K]. log_q: [W, G, K, V] of the drafter. log_p: [W, G, K + 1, V] of the target. coins:
    [W, G, K]. greedy: [W, K] the target's, along the window it would write greedily; None without R_dist.
    draft_cost: c of the reward.
    """
    verdict = verify_chain(
        tokens.flatten(0, 1),
        log_q.flatten(0, 1).exp(),
        log_p.flatten(0, 1).exp(),
        coins.flatten(0, 1),
        torch.zeros_like(coins[..., 0]).flatten(),  # what follows the window is not asked for
    )
    accepted = verdict.num_accepted.view(tokens.shape[:2])
    gap = torch.zeros_like(accepted, dtype=torch.float32)
    if greedy is not None:
        gap = proximity_gap(greedy[:, None], logprobs_of(log_p[:, :, :-1], tokens))
    rules = {"draft_cost": draft_cost, "proximity": config.proximity, "tolerance": config.tolerance}
    if config.expected_reward:
        rewards = expected_reward(verdict.accept_prob.view_as(tokens), gap, **rules)
    else:
        rewards = window_reward(accepted, gap, **rules)
    close = (accepted == 0) & (gap < config.tolerance) & (config.proximity > 0)
    return Judged(logprobs=log_p[:, :, :-1], num_accepted=accepted, rewards=rewards, close=close)


def sampled(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A token of each distribution, [W, G, V] and [W, G] -> [W, G]."""
    probs = logprobs.detach().flatten(0, 1).exp()
    return sample_cdf(probs, uniforms.flatten()).view_as(uniforms)


def logprobs_of(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logprobs of tokens, [..., V] and [...] -> [...]."""
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _generator(seed: int, step: int, row: int) -> torch.Generator:
    """What is random about a trajectory's windows in a step."""
    state = np.random.SeedSequence((seed % 2**64, step, row)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
