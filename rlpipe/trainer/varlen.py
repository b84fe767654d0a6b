"""Attention over branches on a GPU: two kernels a layer for any number of branches.

The decomposition and gradients are the same as in `attention.py`. Flash attention runs over sequences of
different lengths, which are stored one after the other and separated by their bounds:

    each branch to itself       causal     queries a a a b b | c c c ...     keys: the same tokens
    siblings to their context   full       queries b b c c c | d d   ...     keys: p p p p | p p a a ...

There is no padding. Keys of a context are copied once for all branches that follow the same tokens, and the
gradients of the copies are added to those of the original keys. The module calls the same operators of ATen
as `torch.nn.attention.varlen`, but directly: the gradient of a part needs the normaliser over all keys, and
that function passes only the part's normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer.attention import index_of, merged_spans, put, take, widened

State = tuple[torch.Tensor, ...]  # a forward call's random state for dropout, which is 0 here


class Sequences(NamedTuple):
    """One call of the kernel. queries, keys: indices of its tokens, None for all tokens in order.

    query_bounds, key_bounds: [n + 1] int32, where each sequence begins. longest: largest number of queries
    and of keys in a sequence.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest: tuple[int, int]
    causal: bool


class Joint(NamedTuple):
    """The result of attention to all keys of some queries.

    grad: the gradient of `out`; both are [Q, heads, d]. norm: [Q, heads]. state: random state of the forward
    call.
    """

    grad: torch.Tensor
    out: torch.Tensor
    norm: torch.Tensor
    state: State


class VarlenPlan:
    """The kernel calls that compute the attention of branches; the same plan serves every layer.

    to_self: attends from each branch to itself. to_context: attends from siblings to the tokens they follow;
    None if no branch has a context.
    """

    def __init__(
        self, branches: Sequence[Branch], selected: Sequence[int] | None, device: torch.device
    ) -> None:
        """Plan the calls. selected: indices of the branches that have queries (None: all)."""
        chosen = list(range(len(branches)) if selected is None else selected)
        key_starts = [0, *accumulate(branch.length for branch in branches)]
        lengths = [branches[i].length for i in chosen]
        query_starts = [0, *accumulate(lengths)]

        tokens = np.concatenate([np.arange(key_starts[i], key_starts[i + 1]) for i in chosen])
        bounds = _bounds(lengths, device)
        self.to_self = Sequences(
            queries=None,
            keys=index_of(tokens, device, count=key_starts[-1]),
            query_bounds=bounds,
            key_bounds=bounds,
            longest=(max(lengths), max(lengths)),
            causal=True,
        )

        # Siblings follow the same tokens: their queries are one sequence.
        by_context: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for row, index in enumerate(chosen):
            if branches[index].context:
                by_context.setdefault(merged_spans(branches[index], key_starts), []).append(row)

        self.to_context: Sequences | None = None
        if by_context:
            queries = [
                np.concatenate([np.arange(query_starts[row], query_starts[row + 1]) for row in rows])
                for rows in by_context.values()
            ]
            keys = [np.concatenate([np.arange(*span) for span in spans]) for spans in by_context]
            self.to_context = Sequences(
                queries=index_of(np.concatenate(queries), device, count=query_starts[-1]),
                keys=torch.from_numpy(np.concatenate(keys)).to(device),
                query_bounds=_bounds(list(map(len, queries)), device),
                key_bounds=_bounds(list(map(len, keys)), device),
                longest=(max(map(len, queries)), max(map(len, keys))),
                causal=False,
            )


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: VarlenPlan, scale: float
) -> torch.Tensor:
    """Compute `attention.branch_attention` on a GPU: query [1, heads, Q, d] -> shape of query."""
    return _VarlenAttention.apply(query, key, value, plan, scale)


class _VarlenAttention(torch.autograd.Function):
    """Attention of branches by the two calls of a plan, with tokens as the first dimension: [Q, heads, d]."""

    @staticmethod
    def forward(ctx, query, key, value, plan, scale):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, norm, state = _forward(q, k, v, plan.to_self, scale)

        # Join with attention to the contexts, weighted by the two normalisers.
        context = plan.to_context
        if context is not None:
            shared, shared_norm, _ = _forward(q, k, v, context, scale)
            self_norm = take(norm, context.queries)
            total = torch.logaddexp(self_norm, shared_norm)
            joint = take(out, context.queries) * (self_norm - total).exp()[..., None]
            joint += shared * (shared_norm - total).exp()[..., None]
            out, norm = put(out, context.queries, joint), put(norm, context.queries, total)

        ctx.save_for_backward(query, key, value, out, norm, *state)
        ctx.plan, ctx.scale = plan, scale
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, norm, *state = ctx.saved_tensors
        q, k, v, grad = (x[0].transpose(0, 1) for x in (query, key, value, grad))
        wide = widened(q.dtype)
        grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]

        # Each call gets output and normaliser over all keys, and adds the gradients of its tokens.
        for sequences in filter(None, (ctx.plan.to_self, ctx.plan.to_context)):
            grad_rows, out_rows, norm_rows, queries = (
                take(x, sequences.queries).contiguous() for x in (grad, out, norm, q)
            )
            keys, values = (take(x, sequences.keys).contiguous() for x in (k, v))
            joint = Joint(grad_rows, out_rows, norm_rows, tuple(state))
            parts = varlen_backward(joint, queries, keys, values, sequences=sequences, scale=ctx.scale)
            for total, part, index in zip(
                grads, parts, (sequences.queries, *[sequences.keys] * 2), strict=True
            ):
                if index is None:
                    total += part
                else:
                    total.index_add_(0, index, part.to(wide))

        likes = (query, key, value)
        return (
            *(x.to(like.dtype).transpose(0, 1)[None] for x, like in zip(grads, likes, strict=True)),
            None,
            None,
        )


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Compute attention [Q, heads, d], its normalisers [Q, heads] and the random state with one call."""
    rows, keys, values = take(q, sequences.queries), take(k, sequences.keys), take(v, sequences.keys)
    tensors = (x.contiguous() for x in (rows, keys, values))
    out, norm, state = varlen_forward(*tensors, sequences=sequences, scale=scale)
    return out, norm.t(), state


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Call the kernel: q [Q, heads, d], k and v [K, groups, d] -> [Q, heads, d], normalisers [heads, Q]."""
    s = sequences
    arguments = s.query_bounds, s.key_bounds, *s.longest, 0.0, s.causal
    kernel = torch.ops.aten._flash_attention_forward
    out, norm, *state, _ = kernel(q, k, v, *arguments, return_debug_mask=False, scale=scale)
    return out, norm, tuple(state)


def varlen_backward(
    joint: Joint,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sequences: Sequences,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q [Q, heads, d] and of k and v [K, groups, d] with the kernel.

    k and v may be only a part of the attended keys: joint has output and normaliser over all keys.
    """
    s = sequences
    arguments = s.query_bounds, s.key_bounds, *s.longest, 0.0, s.causal, *joint.state
    norm = joint.norm.t().contiguous()
    return torch.ops.aten._flash_attention_backward(
        joint.grad, q, k, v, joint.out, norm, *arguments, scale=scale
    )


def _bounds(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where sequences of these lengths begin, and where the last one ends: [n + 1] int32.

    >>> _bounds([2, 3], torch.device("cpu")).tolist()
    [0, 2, 5]
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
