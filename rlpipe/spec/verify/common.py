"""Pieces shared by the verification rules: row selection, the final draw, the choice of backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from rlpipe.spec.sampling import is_tiled, sample_cdf, sample_tiles


def kernel(backend: str, name: str) -> Callable | None:
    """The kernel of that name for backend "triton", None for "torch" (the caller's own code).

    Raises ValueError for an unknown backend.
    """
    if backend == "torch":
        return None
    if backend == "triton":
        return getattr(import_module("rlpipe.spec.kernels"), name)
    raise ValueError(f"backend={backend!r} is unknown; use 'torch' or 'triton'.")


def leading(accepted: torch.Tensor) -> torch.Tensor:
    """Number of leading True per row: [B, gamma] bool -> [B] int64."""
    return accepted.long().cumprod(1).sum(1)


def row(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """probs[b, index[b]]: [B, K, V], [B] -> [B, V]; of a single row on a CPU a view."""
    batch, rows, vocab = probs.shape
    if batch == 1 and probs.device.type == "cpu":
        return probs[:, index.item()]
    flat = torch.arange(batch, device=probs.device) * rows + index
    return probs.reshape(batch * rows, vocab).index_select(0, flat)


def picked(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """probs[..., tokens]: [B, K, V], [B, K] -> [B, K]."""
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def nonempty(residual: torch.Tensor, target_row: torch.Tensor) -> torch.Tensor:
    """The residual, or the target's row where no mass is left. [B, V], [B, V] -> [B, V].

    In exact arithmetic a residual without mass is reached with probability 0; rounding, or a coin of
    exactly 1, can reach it, and then the target itself is the nearest law that can be sampled.
    """
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_row)


def draw(residual: torch.Tensor, target_row: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A token from `nonempty(residual, target_row)` by inverse CDF. [B, V], [B, V], [B] -> [B] int64."""
    return sample_cdf(nonempty(residual, target_row), uniforms)


def draw_after(
    residual: Callable[[slice, torch.Tensor, torch.Tensor | None], torch.Tensor],
    target_probs: torch.Tensor,
    num_accepted: torch.Tensor,
    uniforms: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The token after the accepted drafts, by `draw`; on a CPU and a large vocabulary row by row.

    residual: (rows of the batch, their target row [m, V], out [m, V] or None) -> [m, V] of dtype, what
    the rule samples there; after gamma drafts that is the target row itself. With `out` it is written
    there, and the rows are one that rejected a draft.
    target_probs: [B, gamma + 1, V]. num_accepted: [B]. uniforms: [B]. Returns [B] int64.
    """
    if not is_tiled(target_probs):
        target_row = row(target_probs, num_accepted)
        return draw(residual(slice(None), target_row, None), target_row, uniforms)

    counts, gamma = num_accepted.tolist(), target_probs.shape[1] - 1

    def target_row(rows: slice) -> torch.Tensor:
        return target_probs[rows, counts[rows.start]]

    def fill(rows: slice, out: torch.Tensor) -> None:
        if counts[rows.start] == gamma:
            out.copy_(target_row(rows))  # without reading the draft's row
        else:
            residual(rows, target_row(rows), out)

    return sample_tiles(fill, target_row, target_probs.shape[-1], dtype, uniforms)
