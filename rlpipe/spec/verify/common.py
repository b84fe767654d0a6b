"""Pieces shared by the verification rules: row selection, the final draw, the choice of backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from rlpipe.spec.sampling import sample_cdf


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
    """probs[b, index[b]]: [B, K, V], [B] -> [B, V]."""
    batch, rows, vocab = probs.shape
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
