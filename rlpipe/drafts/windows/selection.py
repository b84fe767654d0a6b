"""Selects the windows to train on: Adaptive Divergence-Aware Windowing (PPOW §4.2, App. A.3).

P is the target's and Q the drafter's distribution at a position, both after the tokens of a text of the
target. A window is the K positions j .. j + K - 1. The caller computes entropy and divergence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def confidence(entropy: Tensor, vocab: int) -> Tensor:
    """Compute C(P) = 1 - H(P) / log |V|, from 0 (uniform) to 1 (one token); entropy H in nats, [...] -> same.

    >>> confidence(torch.tensor([0.0, math.log(4)]), vocab=4).tolist()
    [1.0, 0.0]
    """
    return (1 - entropy / math.log(vocab)).clamp(0, 1)


def criticality(entropy: Tensor, kl: Tensor, vocab: int) -> Tensor:
    """Compute v = C(P) KL(P || Q), nats: large where Q misses a confident target. [...] twice -> [...]."""
    return confidence(entropy, vocab) * kl.clamp(min=0)


def learnable_kl(log_p: Tensor, log_q: Tensor, ids: Tensor | None) -> Tensor:
    """Compute KL(P || Q) without the part that training cannot lower, in nats: [..., V] twice -> [...].

    With S the draft's vocabulary (ids [S], None for all) the chain rule gives KL = KL(P(S) || Q(S)) + P(S)
    KL(P(. | S) || Q(. | S)). Q(S) is fixed, so the first term is constant, about 60 P(not S)
    (`drafts.vocabulary.OUTSIDE`). Returns the second term.

    >>> p, q = torch.tensor([0.5, 0.1, 0.4]).log(), torch.tensor([0.5, 0.5, 1e-26]).log()
    >>> learnable_kl(p, q, None) > 20, round(learnable_kl(p, q, torch.tensor([0, 1])).item(), 4)
    (tensor(True), 0.1456)
    """
    if ids is not None:
        log_p, log_q = log_p.index_select(-1, ids), log_q.index_select(-1, ids)
        known = log_p.logsumexp(-1)
        return (log_p.exp() * (log_p - log_q.log_softmax(-1))).sum(-1) - known.exp() * known
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def window_scores(critical: Tensor, length: int) -> Tensor:
    """Compute s_j = mean of v_j .. v_{j+K-1}: [..., T] -> [..., T - K + 1].

    Raises ValueError when the text is shorter than a window.

    >>> window_scores(torch.tensor([1.0, 3.0, 5.0]), 2).tolist()
    [2.0, 4.0]
    """
    if critical.shape[-1] < length:
        raise ValueError(f"a text of {critical.shape[-1]} positions has no window of {length}: leave it out.")
    return critical.unfold(-1, length, 1).mean(-1)


def hard_share(step: int, steps: int, *, start: float, end: float, after: int = 0) -> float:
    """Return the share of windows sampled by score at `step` (0-based) of `steps` steps.

    It is 0 in the first `after` steps, then changes linearly from start to end. If steps <= after, the share
    is always 0.

    >>> [hard_share(step, 4, start=0.2, end=0.8, after=1) for step in range(4)]
    [0.0, 0.2, 0.5, 0.8]
    """
    if step < after:
        return 0.0
    last = steps - 1 - after
    return start + (end - start) * (min(step - after, last) / last if last > 0 else 1.0)


def window_distribution(scores: Tensor, hard: float) -> Tensor:
    """Compute each window's probability, hard * s_j / sum s + (1 - hard) / n: [n] -> [n].

    The uniform part is the paper's "other windows"; if all scores are 0 it has the full mass. If some scores
    are infinite, these windows share the hard part equally and the others get none of it.
    """
    weights = scores.isinf().double() if scores.isinf().any() else scores.double()
    uniform = torch.full_like(weights, 1 / len(weights))
    total = weights.sum()
    return hard * weights / total + (1 - hard) * uniform if total > 0 else uniform


def sample_windows(scores: Tensor, count: int, hard: float, *, generator: torch.Generator) -> Tensor:
    """Sample `count` starts of windows with replacement, by `window_distribution`: [n] -> [count] int64.

    hard: the share of windows sampled by score.
    """
    return torch.multinomial(window_distribution(scores, hard), count, replacement=True, generator=generator)
