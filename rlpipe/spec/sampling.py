"""Probabilities, CDF sampling and the random streams of a request. Pure functions.

Owns how a float becomes a token. A request's uniforms depend only on (seed, position, stream), so
its output does not depend on what else the engine runs. Position is the index among the request's
output tokens; the three streams never share a number, because a draft and the coin or residual that
verifies it must be independent.

A draft that was proposed for a position and discarded before that position was reached leaves no
trace in the output, so using the position's uniforms again is exact. Block verification is the
exception: its deeper drafts and coins help decide how many are accepted, so a step takes all its uniforms
from the row of its first position.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch

# On a CPU, rows of a large vocabulary are sampled by `sample_tiles`; elsewhere these are not used.
TILED_VOCAB = 2**15  # smallest tiled size; does not count rows, so that no row depends on its batch
TILE = 1024  # tokens a partial sum covers
ROUNDING = 2**-19  # relative error of a float32 sum over a tile: no term is in more than 32 additions


class Stream(IntEnum):
    """Column of the uniforms of a position."""

    DRAFT = 0  # samples the drafted token
    COIN = 1  # accepts or rejects it
    RESIDUAL = 2  # samples the token the target adds: residual, bonus, or plain sampling


def request_uniforms(seed: int, positions: int, streams: int = len(Stream)) -> np.ndarray:
    """Return the uniforms of a request; row i does not depend on `positions`.

    Philox keyed by the seed, 53 bits each: 24-bit uniforms cannot reach many tokens of a large vocabulary.

    seed: any integer. streams: more than `Stream` for the further nodes of a tree.
    Returns [positions, streams] float64 in [0, 1).

    >>> bool((request_uniforms(7, 2) == request_uniforms(7, 5)[:2]).all())
    True
    """
    bits = np.random.Philox(key=seed % 2**128)
    return np.random.Generator(bits).random((positions, streams))


def log_probs(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Compute log-softmax(logits / temperature) in float32.

    logits: [B, ..., V], any float dtype. temperature: [B] > 0, or None for 1.
    Returns [B, ..., V] float32.
    """
    return _tempered(logits, temperature).log_softmax(-1)


def softmax(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Compute softmax(logits / temperature) in float32; arguments as in `log_probs`."""
    return _tempered(logits, temperature).softmax(-1)


def _tempered(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    logits = logits.float()
    return logits if temperature is None else logits / temperature.view(-1, *[1] * (logits.dim() - 1))


def sample_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample from unnormalised weights by inverse CDF, the CDF in float64.

    weights: [B, V] >= 0 with a positive sum. uniforms: [B] float64 in [0, 1].
    Returns [B] int64, always an index of positive weight: when rounding puts the uniform at or
    beyond the total, the last such index, even where that is not V - 1.

    >>> sample_cdf(torch.tensor([[0.0, 1.0, 3.0, 0.0]]), torch.tensor([1.0], dtype=torch.float64))
    tensor([2])
    """
    if is_tiled(weights):

        def fill(rows: slice, out: torch.Tensor) -> None:
            out.copy_(weights[rows])

        return sample_tiles(fill, uniforms, vocab=weights.shape[1], dtype=weights.dtype)

    cdf = weights.cumsum(-1, dtype=torch.float64)
    return _first_beyond(cdf, cdf[:, -1:] * uniforms.unsqueeze(1)).squeeze(1)


def is_tiled(probs: torch.Tensor) -> bool:
    """Return whether rows of probs [..., V] are handled one at a time: on a CPU, if the vocabulary is large.

    There a temporary as large as the batch is fresh memory in every call, whose page faults cost ten times
    the arithmetic.
    """
    return probs.device.type == "cpu" and probs.shape[-1] >= TILED_VOCAB


@torch.no_grad()
def sample_tiles(
    fill: Callable[[slice, torch.Tensor], None],
    uniforms: torch.Tensor,
    *,
    vocab: int,
    dtype: torch.dtype,
    fallback: Callable[[slice], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sample as `sample_cdf` from weights that never exist all at once: sum tiles, then search inside one.

    fill: (a row of the batch as a slice, buffer [1, V]) writes its weights. uniforms: [B] float64. dtype: of
    the weights. fallback: the slice -> [1, V], instead of weights without mass; None if there are none.
    Returns [B] int64, the token of `sample_cdf`, unless the uniform is within V * 2**-52 of a boundary,
    where the two round differently and either neighbour is right.

    Tiles of float32 are summed in float32 first, many times faster than in float64 on a CPU. Where that
    might have changed the token, they are summed again.
    """
    tiles = torch.empty(-(-vocab // TILE), TILE, dtype=dtype)
    tiles.view(-1)[vocab:] = 0
    weights = tiles.view(1, -1)[:, :vocab]
    rough = torch.promote_types(dtype, torch.float32)

    tokens = []
    for b, uniform in enumerate(uniforms.tolist()):
        rows = slice(b, b + 1)
        fill(rows, weights)
        cdf = _mass(tiles, rough).cumsum()
        # In exact arithmetic a row without mass does not occur; rounding can empty it.
        if fallback is not None and not cdf[-1] > 0:
            weights.copy_(fallback(rows))
            cdf = _mass(tiles, rough).cumsum()

        token, certain = _search(tiles, cdf, uniform)
        if rough is torch.float32 and not certain:
            token, _ = _search(tiles, _mass(tiles, torch.float64).cumsum(), uniform)
        tokens.append(token)
    return torch.tensor(tokens, dtype=torch.int64)


def _mass(tiles: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return tiles.sum(-1, dtype=dtype).numpy().astype(np.float64)


def _search(tiles: torch.Tensor, cdf: np.ndarray, uniform: float) -> tuple[int, bool]:
    """Find the token of [tiles, TILE] weights from `cdf` over tiles; and whether it holds within ROUNDING.

    With C the mass of the tiles before the token's and T the total, an error d shifts the threshold against a
    boundary in that tile by u dT - dC = u d(T - C) - (1 - u) dC.

    In NumPy, whose calls on a few hundred numbers take a fifth of torch's.
    """
    threshold = cdf[-1] * uniform
    tile = _beyond(cdf, threshold)
    before = cdf[tile - 1] if tile else 0.0

    inside = tiles[tile].double().numpy().cumsum()
    threshold = max(threshold - before, 0.0)  # rounding below 0 would find a token without weight
    index = _beyond(inside, threshold)

    start = inside[index - 1] if index else 0.0
    shift = ROUNDING * (uniform * (cdf[-1] - before) + (1 - uniform) * before)
    return tile * TILE + index, bool(min(threshold - start, inside[index] - threshold) > shift)


def _beyond(cdf: np.ndarray, threshold: float) -> int:
    """Do `_first_beyond` in a single row; NaN compares beyond all."""
    index = cdf.searchsorted(threshold, "right")
    return int(index if index < len(cdf) else cdf.searchsorted(cdf[-1]))


def _first_beyond(cdf: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Find the first index whose sum exceeds a threshold, at most the last of positive weight.

    cdf: [B, N]. threshold: [B, 1]. Returns [B, 1].
    """
    index = torch.searchsorted(cdf, threshold, right=True)
    return torch.minimum(index, torch.searchsorted(cdf, cdf[:, -1:].contiguous()))


def greedy_rows(probs: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Replace the distributions of greedy rows by a one at their argmax.

    probs: [B, ..., V]. greedy: [B] bool. Returns a new tensor of the shape of probs.
    """
    one_hot = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy.view(-1, *[1] * (probs.dim() - 1)), one_hot, probs)
