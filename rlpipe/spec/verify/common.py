"""Functions that the verification rules share: row selection, the last token, the choice of backend."""

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
    """Count the leading True values of each row: [B, gamma] bool -> [B] int64."""
    return accepted.cumprod(1, dtype=torch.int64).sum(1)


def row(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select probs[b, index[b]]: [B, K, V], [B] -> [B, V]; a view if it is a single row on a CPU."""
    batch, rows, vocab = probs.shape
    if batch == 1 and probs.device.type == "cpu":
        return probs[:, int(index)]

    flat = torch.arange(batch, device=probs.device) * rows + index
    return probs.reshape(batch * rows, vocab).index_select(0, flat)


def picked(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Select probs[b, k, tokens[b, k]]: [B, at least K, V], [B, K] -> [B, K]."""
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def nonempty(residual: torch.Tensor, target_row: torch.Tensor) -> torch.Tensor:
    """Return the residual, or the target's row if the residual has no mass: [B, V], [B, V] -> [B, V].

    In exact arithmetic a residual without mass has probability 0, but rounding, or a coin of exactly 1, can
    produce one. The target is then the nearest distribution from which to sample.
    """
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_row)


# (m rows of the batch that rejected a draft, their draft row [m, V], their target row [m, V], out) ->
# unnormalised residual [m, V]. It is written to `out` [m, V] unless `out` is None.
Residual = Callable[[slice, torch.Tensor | None, torch.Tensor, torch.Tensor | None], torch.Tensor]


def weights_after(
    residual: Residual,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    *,
    num_accepted: torch.Tensor,
) -> torch.Tensor:
    """Return the unnormalised distribution of the token after the accepted drafts: residual or p_{gamma+1}.

    Arguments as in `sample_after`. Rows that accepted every draft use p_{gamma+1}.
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

    draft_probs: [B, gamma, V], or None if the residual does not read them. target_probs: [B, gamma + 1, V].
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
