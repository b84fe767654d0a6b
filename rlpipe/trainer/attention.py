"""Attention over branches that share their prefixes, in memory linear in the tokens.

A branch attends to the tokens it follows, and causally to itself. Both are plain flash attention, so no mask
is ever materialised; the two results are joined by their normalisers. With out_i = softmax(s_i) V_i and
L_i = logsumexp(s_i) of a part i of the keys (Liu et al. 2023, Ring Attention, use the same identity):

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) out_i

Backwards, the kernel's gradient of each part is right if it gets `out` and `L` of all parts together: it
computes p = exp(s - L) and dS = p (dP - <dO, out>) from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from rlpipe.batching.micro_batch import Branch

Seed = tuple[torch.Tensor, torch.Tensor] | None  # of a GPU kernel's dropout, which is 0 here


def branch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    branches: Sequence[Branch],
    scale: float,
    selected: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend from each branch to its context and, causally, to itself: query [1, heads, Q, d] -> the same.

    key, value: [1, groups, N, d] of all branches; heads is a multiple of groups. selected: the branches whose
    queries are in `query` (None: all). Only where `has_flash`.
    """
    return _BranchAttention.apply(query, key, value, list(_spans(branches, selected)), scale)


def has_flash(query: torch.Tensor) -> bool:
    """Return whether there is a flash attention kernel for tensors like this."""
    half_precision = query.dtype in (torch.float16, torch.bfloat16)
    return not query.is_cuda or (half_precision and query.shape[-1] % 8 == 0)


class _BranchAttention(torch.autograd.Function):
    """Attention of branches; spans: queries, keys and context of each, as `_spans` yields them."""

    @staticmethod
    def forward(ctx, query, key, value, spans, scale):
        out = torch.empty_like(query)
        norms = query.new_empty(query.shape[:3], dtype=_wide(query.dtype))
        seed = None

        for rows, self_keys, context in spans:
            q = query[:, :, rows]
            part, norm, seed = _forward(
                q, key[:, :, self_keys], value[:, :, self_keys], scale=scale, causal=True
            )

            # Join with attention to the context, weighted by the two normalisers.
            if context:
                keys, values = _joined(key, context), _joined(value, context)
                shared, shared_norm, _ = _forward(q, keys, values, scale=scale)
                total = torch.logaddexp(norm, shared_norm)
                part = (
                    part * (norm - total).exp()[..., None] + shared * (shared_norm - total).exp()[..., None]
                )
                norm = total

            out[:, :, rows], norms[:, :, rows] = part, norm

        ctx.save_for_backward(query, key, value, out, norms)
        ctx.spans, ctx.scale, ctx.seed = spans, scale, seed
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, norms = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Many branches add to the keys they share: summed in float32 at least.
        grad_key, grad_value = (torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (key, value))

        for rows, self_keys, context in ctx.spans:
            # Each call gets the output and normaliser over all keys, and returns the gradient of its keys.
            q = query[:, :, rows]
            joint = _Joint(out[:, :, rows], norms[:, :, rows], grad[:, :, rows], ctx.scale, ctx.seed)
            dq, dk, dv = _backward(q, key[:, :, self_keys], value[:, :, self_keys], joint=joint, causal=True)
            grad_key[:, :, self_keys] += dk
            grad_value[:, :, self_keys] += dv

            if context:
                keys, values = _joined(key, context), _joined(value, context)
                context_dq, dk, dv = _backward(q, keys, values, joint=joint)
                dq = dq + context_dq

                # The gradient of the joined keys goes back to the spans they came from.
                start = 0
                for span in context:
                    end = start + span.stop - span.start
                    grad_key[:, :, span] += dk[:, :, start:end]
                    grad_value[:, :, span] += dv[:, :, start:end]
                    start = end

            grad_query[:, :, rows] = dq
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _spans(
    branches: Sequence[Branch], selected: Sequence[int] | None
) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield, for each branch, the slices of its queries, of its keys, and those of its context."""
    starts = list(accumulate((branch.length for branch in branches), initial=0))
    used = 0
    for index in range(len(branches)) if selected is None else selected:
        branch = branches[index]
        context: list[slice] = []

        for j, count in branch.context:
            # Adjacent slices are merged.
            if context and context[-1].stop == starts[j]:
                context[-1] = slice(context[-1].start, starts[j] + count)
            else:
                context.append(slice(starts[j], starts[j] + count))

        rows = slice(used, used + branch.length)
        yield rows, slice(starts[index], starts[index] + branch.length), context
        used = rows.stop


def _joined(x: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """Concatenate spans of tokens; a single one is not copied."""
    return x[:, :, spans[0]] if len(spans) == 1 else torch.cat([x[:, :, span] for span in spans], 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Seed]:
    """Compute attention [1, heads, Q, d], its normaliser [1, heads, Q], and the seed its gradient needs."""
    if not q.is_cuda:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *flash(q, k, v, 0.0, causal, scale=scale), None

    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, norm, _, _, _, _, seed, offset, _ = flash(q, k, v, 0.0, causal, scale=scale)
    return out, norm, (seed, offset)


class _Joint(NamedTuple):
    """The result of attention to all keys of some queries, and its gradient. seed: of the forward kernel."""

    out: torch.Tensor
    norm: torch.Tensor
    grad: torch.Tensor
    scale: float
    seed: Seed


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, joint: _Joint, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q, k and v, where k and v are a part of the keys that `joint` attended to."""
    out, norm, grad, scale, seed = joint
    if seed is None:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, norm, 0.0, causal, scale=scale)

    # No cumulative lengths: all rows have one length.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = None, None, q.shape[2], k.shape[2]
    return flash(grad, q, k, v, out, norm.contiguous(), *lengths, 0.0, causal, *seed, scale=scale)
