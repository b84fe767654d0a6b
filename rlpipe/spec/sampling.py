"""Probabilities, CDF sampling and the random streams of a request. Pure functions.

Owns how a float becomes a token. A request's uniforms depend only on (seed, position, stream), so
its output does not depend on what else the engine runs. Position is the index among the request's
output tokens; the three streams never share a number, because a draft and the coin or residual that
judges it must be independent.

A draft that was proposed for a position and thrown away before that position was reached leaves no
trace in what was emitted, so drawing the position's uniforms again is exact.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Column of the uniforms of a position."""

    DRAFT = 0  # samples the drafted token
    COIN = 1  # accepts or rejects it
    RESIDUAL = 2  # samples the token the target adds: residual, bonus, or plain sampling


def request_uniforms(seed: int, positions: int, streams: int = len(Stream)) -> np.ndarray:
    """The uniforms of a request.

    Philox keyed by the seed, 53 bits each: 24-bit uniforms can never draw many tokens of a large
    vocabulary. Row i does not depend on `positions`.

    seed: any integer. streams: more than `Stream` for the further nodes of a tree.
    Returns [positions, streams] float64 in [0, 1).

    >>> bool((request_uniforms(7, 2) == request_uniforms(7, 5)[:2]).all())
    True
    """
    bits = np.random.Philox(key=seed % 2**128)
    return np.random.Generator(bits).random((positions, streams))


def log_probs(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """log-softmax(logits / temperature) in float32.

    logits: [B, ..., V], any float dtype. temperature: [B] > 0, or None for 1.
    Returns [B, ..., V] float32.
    """
    return _tempered(logits, temperature).log_softmax(-1)


def softmax(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """exp of `log_probs`, where the logarithms are not needed."""
    return _tempered(logits, temperature).softmax(-1)


def _tempered(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    logits = logits.float()
    return logits if temperature is None else logits / temperature.view(-1, *[1] * (logits.dim() - 1))


def sample_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sample from unnormalised weights, the CDF in float64.

    weights: [B, V] >= 0 with a positive sum. uniforms: [B] float64 in [0, 1].
    Returns [B] int64, always an index of positive weight: when rounding puts the uniform at or
    beyond the total, the last such index, never V - 1 as such.

    >>> sample_cdf(torch.tensor([[0.0, 1.0, 3.0, 0.0]]), torch.tensor([1.0], dtype=torch.float64))
    tensor([2])
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    index = torch.searchsorted(cdf, total * uniforms.unsqueeze(1), right=True)
    last = torch.searchsorted(cdf, total)
    return torch.minimum(index, last).squeeze(1)


def greedy_rows(probs: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Replace the distributions of greedy rows by a one at their argmax.

    probs: [B, ..., V]. greedy: [B] bool. Returns a new tensor of the shape of probs.
    """
    one_hot = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy.view(-1, *[1] * (probs.dim() - 1)), one_hot, probs)
