"""Probabilities, CDF sampling and the random streams of a request. Pure functions.

Owns the mapping from uniforms to tokens. A request's uniforms depend only on (seed, position, stream), so its
output does not depend on what else the engine runs. The position is the index among the request's output
tokens. The three streams never share a number, because a draft must be independent of the coin and the
residual uniform that verify it.

A draft may be proposed for a position and then discarded before that position is reached. It does not
influence the output, so the position's uniforms can be used again exactly. Block verification is the
exception: deeper drafts and coins help decide how many drafts are accepted, so a step takes all its uniforms
from the row of its first position.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch

# Constants of `sample_tiles`, which samples rows of a large vocabulary on a CPU.
TILED_VOCAB = 2**15  # smallest tiled vocabulary; ignores the number of rows, so no row depends on its batch
TILE = 1024  # tokens per partial sum
ROUNDING = 2**-19  # relative error of a float32 sum over a tile (each term is in at most 32 additions)


class Stream(IntEnum):
    """Column of the uniforms of a position."""

    DRAFT = 0  # samples the draft token
    COIN = 1  # accepts or rejects the draft token
    RESIDUAL = 2  # samples the token that the target adds: residual, bonus, or plain sampling


def request_uniforms(seed: int, positions: int, streams: int = len(Stream)) -> np.ndarray:
    """Return the uniforms of a request; row i does not depend on `positions`.

    The generator is Philox, keyed by the seed. Each uniform has 53 bits, because 24-bit uniforms cannot reach
    many tokens of a large vocabulary.

    seed: any integer. streams: number of columns; a tree needs more than `Stream` has, for its further nodes.
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
    """Sample from unnormalised weights by inverse CDF, with the CDF in float64.

    weights: [B, V] >= 0 with a positive sum. uniforms: [B] float64 in [0, 1].
    Returns [B] int64, always an index with positive weight. If rounding puts the uniform at or beyond the
    total, the result is the last index with positive weight, which need not be V - 1.

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

    On a CPU, a temporary of the size of the batch is new memory in every call, and its page faults cost ten
    times the arithmetic.
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
    """Sample like `sample_cdf`, with one row of weights in memory at a time: sum all tiles, then search one.

    fill: called with a row of the batch (a slice) and a buffer [1, V]; writes the row's weights to the
    buffer.
    uniforms: [B] float64. dtype: dtype of the weights. fallback: slice -> weights [1, V] for rows without
    mass; None if every row has mass. Returns [B] int64, the same tokens as `sample_cdf`, unless the uniform
    is within V * 2**-52 of a boundary. There the two functions round differently, and both neighbouring
    tokens are correct.

    Tiles of float32 are first summed in float32, which is many times faster than float64 on a CPU. They are
    summed again in float64 if rounding might have changed the token.
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
        # In exact arithmetic every row has mass, but rounding can make all its weights zero.
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
    """Return the token for a uniform u, and whether it is certain, that is, rounding cannot have changed it.

    tiles: weights [tiles, TILE]. cdf: cumulative mass of the tiles, with relative error at most ROUNDING.

    Let C be the mass of the tiles before the token's tile, and T the total. Their errors dC and dT shift the
    threshold relative to a boundary in that tile by u dT - dC = u d(T - C) - (1 - u) dC.

    Uses NumPy, because its calls on a few hundred numbers take a fifth of the time of torch's.
    """
    threshold = cdf[-1] * uniform
    tile = _beyond(cdf, threshold)
    before = cdf[tile - 1] if tile else 0.0

    inside = tiles[tile].double().numpy().cumsum()
    threshold = max(threshold - before, 0.0)  # a negative value could find a token without weight
    index = _beyond(inside, threshold)

    start = inside[index - 1] if index else 0.0
    shift = ROUNDING * (uniform * (cdf[-1] - before) + (1 - uniform) * before)
    return tile * TILE + index, bool(min(threshold - start, inside[index] - threshold) > shift)


def _beyond(cdf: np.ndarray, threshold: float) -> int:
    """Run `_first_beyond` on a single row; a NaN counts as larger than every number."""
    index = cdf.searchsorted(threshold, "right")
    return int(index if index < len(cdf) else cdf.searchsorted(cdf[-1]))


def _first_beyond(cdf: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Find the first index where the CDF exceeds a threshold, but at most the last index of positive weight.

    cdf: [B, N]. threshold: [B, 1]. Returns [B, 1].
    """
    index = torch.searchsorted(cdf, threshold, right=True)
    return torch.minimum(index, torch.searchsorted(cdf, cdf[:, -1:].contiguous()))


def greedy_rows(probs: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Replace the distributions of greedy rows by one-hot distributions at their argmax.

    probs: [B, ..., V]. greedy: [B] bool. Returns a new tensor of the shape of probs.
    """
    one_hot = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy.view(-1, *[1] * (probs.dim() - 1)), one_hot, probs)
