"""Rewards of a drafted window when it is verified (PPOW §4.3).

A window has K drafts, and the first k of them are accepted. p is the target, q the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def speedup_reward(num_accepted: Tensor, draft_cost: float) -> Tensor:
    """Compute R_speedup = k / (k c + 1): [...] -> [...].

    draft_cost: c, the cost of a drafted token in verify steps.

    The paper charges only for accepted drafts, although a step always drafts K of them.

    >>> speedup_reward(torch.tensor([0, 3]), 0.5).tolist()
    [0.0, 1.2000000476837158]
    """
    k = num_accepted.float()
    return k / (k * draft_cost + 1)


def proximity_gap(reference_logprobs: Tensor, drafted_logprobs: Tensor) -> Tensor:
    """Compute Delta = sum_t [log p(y_t | y_<t) - log p(d_t | d_<t)], in nats: [..., K] twice -> [...].

    reference_logprobs: the target's log-probabilities along its own greedy window. drafted_logprobs: the
    target's log-probabilities of the drafts. The result can be negative, as drafts may be likelier than the
    greedy window.
    """
    return (reference_logprobs - drafted_logprobs).float().sum(-1)


def proximity_reward(gap: Tensor, proximity: float, tolerance: float) -> Tensor:
    """Compute R_dist = eta 1[Delta < epsilon]: [...] -> [...].

    gap: Delta, nats. proximity: eta. tolerance: epsilon, nats.
    """
    return proximity * (gap < tolerance).float()


def window_reward(
    num_accepted: Tensor, gap: Tensor, *, draft_cost: float, proximity: float, tolerance: float
) -> Tensor:
    """Compute R = R_speedup + 1[k = 0] R_dist (Algorithm 1, line 20): [...] twice -> [...].

    draft_cost: c of `speedup_reward`. gap, proximity, tolerance: see `proximity_reward`.
    """
    close = proximity_reward(gap, proximity, tolerance)
    return speedup_reward(num_accepted, draft_cost) + torch.where(num_accepted == 0, close, 0.0)


def acceptance_distribution(accept_prob: Tensor) -> Tensor:
    """Compute Pr(k accepted), k = 0..K, where draft t is accepted with probability a_t if all before it are.

    Under rejection a_t = min(1, p(d_t) / q(d_t)). Shapes: [..., K] -> [..., K + 1].

    >>> acceptance_distribution(torch.tensor([0.5, 0.5])).tolist()
    [0.5, 0.25, 0.25]
    """
    reach = torch.cat((torch.ones_like(accept_prob[..., :1]), accept_prob.cumprod(-1)), -1)
    return torch.cat((reach[..., :-1] * (1 - accept_prob), reach[..., -1:]), -1)


def expected_reward(
    accept_prob: Tensor, gap: Tensor, *, draft_cost: float, proximity: float, tolerance: float
) -> Tensor:
    """Compute E[R | drafts] over the coins of verification, instead of R for one sampled k.

    This is not in the paper. It equals the mean of `window_reward` for these drafts and has less variance:
    only the drafts are random. accept_prob: [..., K], gap: [...]. Returns [...]. draft_cost, proximity,
    tolerance: see `window_reward`.
    """
    probs = acceptance_distribution(accept_prob)
    k = torch.arange(probs.shape[-1], device=probs.device)
    close = proximity_reward(gap, proximity, tolerance)
    return (probs * speedup_reward(k, draft_cost)).sum(-1) + probs[..., 0] * close
