"""Attention over branches that share their prefixes, in memory that grows with the tokens alone.

A branch attends to the tokens it follows, and causally to its own. Both are plain flash attention, so no mask
is ever written; the two results are joined by their normalisers. With out_i = softmax(s_i) V_i and
L_i = logsumexp(s_i) of a part i of the keys (Liu et al. 2023, Ring Attention, use the same identity):

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) out_i

Backwards, the kernel's own gradient of each part is right as it stands when it is given `out` and `L` of the
whole: it makes p = exp(s - L) and dS = p (dP - <dO, out>) of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from rlpipe.batching.micro_batch import Branch

Seed = tuple[torch.Tensor, torch.Tensor] | None  # of a GPU kernel's dropout, which is 0 here


def branch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    branches: Sequence[Branch],
    scale: float,
    mine: Sequence[int] | None = None,
) -> torch.Tensor:
    """Each branch to its context and, causally, to itself: query [1, heads, Q, d] -> the same.

    key, value: [1, groups, N, d] of all branches; heads is a multiple of groups. mine: the branches whose
    queries are given (None: all). Only where `has_flash`.
    """
    return _BranchAttention.apply(query, key, value, list(_spans(branches, mine)), scale)


def has_flash(query: torch.Tensor) -> bool:
    """Whether there is a flash attention kernel for tensors like this."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return not query.is_cuda or (half and query.shape[-1] % 8 == 0)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, spans, scale):
        out = torch.empty_like(query)
        norms = query.new_empty(query.shape[:3], dtype=_wide(query.dtype))
        for here, own, context in spans:
            q = query[:, :, here]
            part, norm, seed = _forward(q, key[:, :, own], value[:, :, own], scale, causal=True)
            if context:
                shared, before, _ = _forward(q, _joined(key, context), _joined(value, context), scale)
                total = torch.logaddexp(norm, before)
                part = part * (norm - total).exp()[..., None] + shared * (before - total).exp()[..., None]
                norm = total
            out[:, :, here], norms[:, :, here] = part, norm
        ctx.save_for_backward(query, key, value, out, norms)
        ctx.spans, ctx.scale, ctx.seed = spans, scale, seed
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, norms = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # many branches add to the keys they share: summed in float32 at least
        grad_key, grad_value = (torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (key, value))
        for here, own, context in ctx.spans:
            q, of_whole = query[:, :, here], (out[:, :, here], norms[:, :, here], grad[:, :, here])
            given = *of_whole, ctx.scale, ctx.seed
            dq, dk, dv = _backward(q, key[:, :, own], value[:, :, own], *given, causal=True)
            grad_key[:, :, own] += dk
            grad_value[:, :, own] += dv
            if context:
                keys, values = _joined(key, context), _joined(value, context)
                more, dk, dv = _backward(q, keys, values, *given)
                dq, done = dq + more, 0
                for span in context:
                    end = done + span.stop - span.start
                    grad_key[:, :, span] += dk[:, :, done:end]
                    grad_value[:, :, span] += dv[:, :, done:end]
                    done = end
            grad_query[:, :, here] = dq
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _spans(
    branches: Sequence[Branch], mine: Sequence[int] | None
) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Where the queries of each branch lie, its keys, and those of its context."""
    starts = list(accumulate((branch.length for branch in branches), initial=0))
    used = 0
    for index in range(len(branches)) if mine is None else mine:
        branch, context = branches[index], []
        for j, count in branch.context:
            if context and context[-1].stop == starts[j]:  # pieces that lie one after the other are one
                context[-1] = slice(context[-1].start, starts[j] + count)
            else:
                context.append(slice(starts[j], starts[j] + count))
        here = slice(used, used + branch.length)
        yield here, slice(starts[index], starts[index] + branch.length), context
        used = here.stop


def _joined(x: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    return x[:, :, spans[0]] if len(spans) == 1 else torch.cat([x[:, :, span] for span in spans], 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Seed]:
    """Attention [1, heads, Q, d], its normaliser [1, heads, Q], and what the kernel's gradient asks for."""
    if not q.is_cuda:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *flash(q, k, v, 0.0, causal, scale=scale), None
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, norm, _, _, _, _, seed, offset, _ = flash(q, k, v, 0.0, causal, scale=scale)
    return out, norm, (seed, offset)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    grad: torch.Tensor,
    scale: float,
    seed: Seed,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. out, norm: of attention to all keys, of which k and v are a part."""
    if seed is None:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, norm, 0.0, causal, scale=scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = None, None, q.shape[2], k.shape[2]  # all rows of one length
    return flash(grad, q, k, v, out, norm.contiguous(), *lengths, 0.0, causal, *seed, scale=scale)
