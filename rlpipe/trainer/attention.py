"""Attention over branches that share their prefixes, in memory linear in the tokens, on a CPU.

A branch attends to the tokens it follows, and causally to itself. Both are plain flash attention, so no mask
is ever materialised. The two results are combined by means of their normalisers, as in Ring Attention (Liu et
al. 2023). With out_i = softmax(s_i) V_i and L_i = logsumexp(s_i) for a part i of the keys:

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) out_i

In the backward pass, the kernel computes the correct gradient of a part if it is called with `out` and `L` of
all parts together: from these it computes p = exp(s - L) and dS = p (dP - <dO, out>).

Branches share calls of the kernel (`BranchPlan`). Branches that follow the same tokens attend to them in one
call, and branches of similar length attend to themselves as the rows of a batch. The padding is at the end of
a row, so causal attention does not read it; the gradient at padding is set to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpipe.batching.micro_batch import Branch

MIN_LENGTH_STEP = 8  # branches whose lengths differ by fewer tokens may share a call


class Bucket(NamedTuple):
    """Branches of similar length in one call. rows: slice of the padded tokens. branches: their number."""

    rows: slice
    branches: int


class Siblings(NamedTuple):
    """Branches that follow the same tokens. rows: slice of `context_index`. context: slices of the keys."""

    rows: slice
    context: list[slice]


class BranchPlan:
    """The kernel calls that compute the attention of branches; the same plan serves every layer.

    key_index: [Q] the key of each query's own token. padded_index: [P] the queries in the order of buckets; a
    row is padded by repeating its last token. padding: [P] whether an entry is padding. order: [Q] the
    inverse of padded_index. context_index: [R] the queries of branches with a context, in the order of
    siblings. An index is None where it would be 0, 1, 2, ...
    """

    def __init__(
        self, branches: Sequence[Branch], selected: Sequence[int] | None, device: torch.device
    ) -> None:
        """Plan the calls. selected: indices of the branches that have queries (None: all)."""
        self.selected = list(range(len(branches)) if selected is None else selected)
        key_starts = [0, *accumulate(branch.length for branch in branches)]
        lengths = [branches[i].length for i in self.selected]
        query_starts = [0, *accumulate(lengths)]

        # Branches of similar length form a bucket, those that follow the same tokens are siblings.
        by_length: dict[int, list[int]] = {}
        by_context: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for row, index in enumerate(self.selected):
            by_length.setdefault(_rounded(lengths[row]), []).append(row)
            if branches[index].context:
                by_context.setdefault(merged_spans(branches[index], key_starts), []).append(row)

        # Rows of a bucket are as long as its longest branch.
        self.buckets: list[Bucket] = []
        padded, padding, used = [], [], 0
        for rows in by_length.values():
            size = max(lengths[row] for row in rows)
            for row in rows:
                padded.append(query_starts[row] + np.minimum(np.arange(size), lengths[row] - 1))
                padding.append(np.arange(size) >= lengths[row])
            self.buckets.append(Bucket(slice(used, used + size * len(rows)), len(rows)))
            used += size * len(rows)

        self.siblings: list[Siblings] = []
        with_context, used = [], 0
        for spans, rows in by_context.items():
            with_context += [np.arange(query_starts[row], query_starts[row + 1]) for row in rows]
            count = sum(lengths[row] for row in rows)
            self.siblings.append(
                Siblings(slice(used, used + count), [slice(start, stop) for start, stop in spans])
            )
            used += count

        keys = [np.arange(key_starts[i], key_starts[i + 1]) for i in self.selected]
        is_padding = np.concatenate(padding)
        padded_index = np.concatenate(padded)
        order = np.empty(query_starts[-1], dtype=np.int64)
        order[padded_index[~is_padding]] = np.flatnonzero(~is_padding)

        self.key_index = index_of(np.concatenate(keys), device, count=key_starts[-1])
        self.padded_index = index_of(padded_index, device, count=query_starts[-1])
        self.order = index_of(order, device, count=len(padded_index))
        self.padding = torch.from_numpy(is_padding).to(device) if is_padding.any() else None
        self.context_index = (
            index_of(np.concatenate(with_context), device, count=query_starts[-1]) if with_context else None
        )


def branch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: BranchPlan, scale: float
) -> torch.Tensor:
    """Attend from each branch to its context and, causally, to itself: query [1, heads, Q, d] -> same shape.

    key, value: [1, groups, N, d] of all branches; heads is a multiple of groups. plan: made for the branches
    of `query`. This is for a CPU; `varlen.varlen_attention` is for a GPU.
    """
    return _BranchAttention.apply(query, key, value, plan, scale)


def has_flash(query: torch.Tensor) -> bool:
    """Return whether there is a flash attention kernel for queries [..., d] of this device and dtype."""
    half_precision = query.dtype in (torch.float16, torch.bfloat16)
    return not query.is_cuda or (half_precision and query.shape[-1] % 8 == 0)


class _BranchAttention(torch.autograd.Function):
    """Attention of branches by the calls of a plan. Internal tensors have tokens first: [Q, heads, d]."""

    @staticmethod
    def forward(ctx, query, key, value, plan, scale):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))

        # Attend from each branch to itself.
        padded = [take(x, plan.padded_index) for x in (q, *(take(x, plan.key_index) for x in (k, v)))]
        parts = []
        for rows, count in plan.buckets:
            part = _forward(*(_as_batch(x[rows], count) for x in padded), scale=scale, causal=True)
            parts.append([_as_tokens(x) for x in part])
        out, norm = (take(_joined(x), plan.order) for x in zip(*parts, strict=True))

        # Join with attention to the contexts, weighted by the two normalisers.
        if plan.siblings:
            queries, parts = take(q, plan.context_index), []
            for rows, context in plan.siblings:
                keys, values = (_joined([x[span] for span in context]) for x in (k, v))
                part = _forward(*(_as_batch(x, 1) for x in (queries[rows], keys, values)), scale=scale)
                parts.append([_as_tokens(x) for x in part])

            shared, shared_norm = (_joined(x) for x in zip(*parts, strict=True))
            self_norm = take(norm, plan.context_index)
            total = torch.logaddexp(self_norm, shared_norm)
            joint = take(out, plan.context_index) * (self_norm - total).exp()[..., None]
            joint += shared * (shared_norm - total).exp()[..., None]
            out, norm = put(out, plan.context_index, joint), put(norm, plan.context_index, total)

        ctx.save_for_backward(query, key, value, out, norm)
        ctx.plan, ctx.scale = plan, scale
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, norm = ctx.saved_tensors
        plan: BranchPlan = ctx.plan
        q, k, v, grad = (x[0].transpose(0, 1) for x in (query, key, value, grad))

        # The kernel takes up to five times as long in half precision.
        q, k, v, out, grad = (x.to(widened(x.dtype)) for x in (q, k, v, out, grad))

        # Each call gets the output and normaliser over all keys, and returns the gradient of its keys.
        self_keys, self_values = (take(x, plan.key_index) for x in (k, v))
        padded = [take(x, plan.padded_index) for x in (q, self_keys, self_values, out, norm, grad)]
        if plan.padding is not None:
            padded[-1].masked_fill_(plan.padding[:, None, None], 0)
        parts = []
        for rows, count in plan.buckets:
            *batch, out_rows, norm_rows, grad_rows = (_as_batch(x[rows], count) for x in padded)
            joint = _Joint(out_rows, norm_rows, grad_rows, ctx.scale)
            parts.append([_as_tokens(x) for x in _backward(*batch, joint=joint, causal=True)])
        grad_query, *self_grads = (take(_joined(x), plan.order) for x in zip(*parts, strict=True))

        # Many branches add to the keys they share, so sum in float32 at least.
        grad_key, grad_value = (
            put(torch.zeros(x.shape, dtype=widened(x.dtype), device=x.device), plan.key_index, part)
            for x, part in zip((k, v), self_grads, strict=True)
        )

        if plan.siblings:
            selected = [take(x, plan.context_index) for x in (q, out, norm, grad)]
            parts = []
            for rows, context in plan.siblings:
                keys, values = (_joined([x[span] for span in context]) for x in (k, v))
                queries, out_rows, norm_rows, grad_rows = (_as_batch(x[rows], 1) for x in selected)
                joint = _Joint(out_rows, norm_rows, grad_rows, ctx.scale)
                part = _backward(queries, _as_batch(keys, 1), _as_batch(values, 1), joint=joint)
                context_grad, dk, dv = (_as_tokens(x) for x in part)
                parts.append(context_grad)

                # The gradient of the joined keys goes back to the spans they came from.
                start = 0
                for span in context:
                    end = start + span.stop - span.start
                    grad_key[span] += dk[start:end]
                    grad_value[span] += dv[start:end]
                    start = end

            total = take(grad_query, plan.context_index) + _joined(parts)
            grad_query = put(grad_query, plan.context_index, total)

        grads = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
        return *(x.to(like.dtype).transpose(0, 1)[None] for x, like in grads), None, None


def _rounded(length: int) -> int:
    """Round a length up, by less than a quarter if it exceeds 32, so that few distinct lengths remain.

    >>> [_rounded(n) for n in (1, 8, 9, 40, 41, 65, 300)]
    [8, 8, 16, 40, 48, 80, 320]
    """
    step = max(MIN_LENGTH_STEP, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def merged_spans(branch: Branch, starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the spans (start, stop) of all keys that a branch follows, with adjacent spans merged."""
    spans: list[tuple[int, int]] = []
    for j, count in branch.context:
        if spans and spans[-1][1] == starts[j]:
            spans[-1] = spans[-1][0], starts[j] + count
        else:
            spans.append((starts[j], starts[j] + count))
    return tuple(spans)


def index_of(index: np.ndarray, device: torch.device, *, count: int) -> torch.Tensor | None:
    """Move an index [n] into `count` rows to the device, or return None if it selects all in order."""
    if len(index) == count and (index == np.arange(count)).all():
        return None
    return torch.from_numpy(index).to(device)


def take(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Select rows of x: [N, ...] -> [n, ...]. index: [n] int64; None: all of them, without a copy."""
    return x if index is None else x.index_select(0, index)


def put(x: torch.Tensor, index: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Replace the rows of x that `take` selects with `rows` [n, ...]; return x, [N, ...].

    x is changed in place, unless all rows are replaced. Rows are converted to the dtype of x.
    """
    rows = rows.to(x.dtype)
    return rows if index is None else x.index_copy_(0, index, rows)


def _as_batch(x: torch.Tensor, count: int) -> torch.Tensor:
    """View tokens [count * L, heads, ...] as a kernel's batch [count, heads, L, ...]."""
    return x.unflatten(0, (count, -1)).transpose(1, 2)


def _as_tokens(x: torch.Tensor) -> torch.Tensor:
    """View a kernel's batch [count, heads, L, ...] as tokens [count * L, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tokens; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention [B, heads, Q, d] and its normaliser [B, heads, Q]."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, causal, scale=scale)


class _Joint(NamedTuple):
    """The result of attention to all keys of some queries, and its gradient."""

    out: torch.Tensor
    norm: torch.Tensor
    grad: torch.Tensor
    scale: float


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, joint: _Joint, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q, k and v, where k and v are a part of the keys and values of `joint`."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(joint.grad, q, k, v, joint.out, joint.norm, 0.0, causal, scale=joint.scale)
