"""Functions shared by the verification rules: row selection, the last token, the choice of backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlpipe.spec.sampling import is_tiled, sample_cdf, sample_tiles


def runs_on_kernels(backend: str) -> bool:
    """Return whether a rule runs as Triton kernels ("triton") or as plain torch ("torch").

    Raises ValueError for an unknown backend.
    """
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; use 'torch' or 'triton'.")
    return backend == "triton"


def backend_for(device: torch.device) -> str:
    """Return the faster backend for tensors on a device: the kernels on a GPU, torch elsewhere."""
    return "triton" if device.type == "cuda" else "torch"


def leading(accepted: torch.Tensor) -> torch.Tensor:
    """Count the leading True of each row: [B, gamma] bool -> [B] int64."""
    return accepted.cumprod(1, dtype=torch.int64).sum(1)


def row(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select probs[b, index[b]]: [B, K, V], [B] -> [B, V]; of a single row on a CPU a view."""
    batch, rows, vocab = probs.shape
    if batch == 1 and probs.device.type == "cpu":
        return probs[:, int(index)]

    flat = torch.arange(batch, device=probs.device) * rows + index
    return probs.reshape(batch * rows, vocab).index_select(0, flat)


def picked(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Select probs[b, k, tokens[b, k]]: [B, at least K, V], [B, K] -> [B, K]."""
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def nonempty(residual: torch.Tensor, target_row: torch.Tensor) -> torch.Tensor:
    """Return the residual, or the target's row where no mass remains: [B, V], [B, V] -> [B, V].

    In exact arithmetic a residual without mass is reached with probability 0; rounding, or a coin of
    exactly 1, can reach it, and then the target itself is the nearest distribution that can be sampled.
    """
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_row)


# (rows of the batch, their draft row [m, V], their target row [m, V], out) -> residual [m, V], unnormalised,
# of m rows that rejected a draft; written to `out` [m, V] if that is not None.
Residual = Callable[[slice, torch.Tensor | None, torch.Tensor, torch.Tensor | None], torch.Tensor]


def weights_after(
    residual: Residual,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    *,
    num_accepted: torch.Tensor,
) -> torch.Tensor:
    """Return the unnormalised distribution of the token after the accepted drafts: residual or p_{gamma+1}.

    Arguments as in `sample_after`. The residual of rows that accepted every draft is not used.
    Returns [B, V].
    """
    gamma = target_probs.shape[1] - 1
    target_row = row(target_probs, num_accepted)
    draft_row = None if draft_probs is None else row(draft_probs, num_accepted.clamp(max=gamma - 1))
    rejected = nonempty(residual(slice(None), draft_row, target_row, None), target_row)
    return torch.where((num_accepted < gamma).unsqueeze(1), rejected, target_row)


def sample_after(
    residual: Residual,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    *,
    num_accepted: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Sample a token from `weights_after` by inverse CDF; row by row on a CPU with a large vocabulary.

    draft_probs: [B, gamma, V], None for a residual that reads none. target_probs: [B, gamma + 1, V].
    num_accepted: [B]. uniforms: [B]. Returns [B] int64.
    """
    if not is_tiled(target_probs):
        weights = weights_after(residual, draft_probs, target_probs, num_accepted=num_accepted)
        return sample_cdf(weights, uniforms)

    counts, gamma = num_accepted.tolist(), target_probs.shape[1] - 1

    def target_row(rows: slice) -> torch.Tensor:
        return target_probs[rows, counts[rows.start]]

    def fill(rows: slice, out: torch.Tensor) -> None:
        if (accepted := counts[rows.start]) == gamma:
            out.copy_(target_row(rows))  # without reading the draft's row
        else:
            draft_row = None if draft_probs is None else draft_probs[rows, accepted]
            residual(rows, draft_row, target_row(rows), out)

    dtype = target_probs.dtype if draft_probs is None else torch.result_type(target_probs, draft_probs)
    vocab = target_probs.shape[-1]
    return sample_tiles(fill, uniforms, vocab=vocab, dtype=dtype, fallback=target_row)
