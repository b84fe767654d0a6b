"""Logits over all tokens for a draft with a reduced vocabulary.

In training a token outside the draft's vocabulary has probability exp(-60) instead of 0, so that every loss
is finite over the full vocabulary (a KL from the target would be infinite). An engine never drafts such a
token. Gradients flow through its log-probability as through any other: the forward KL pulls q towards the
target's distribution over the known tokens, weighted by the target's mass on them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

OUTSIDE = -60.0  # log-probability of a token that the draft does not know


def spread(
    known: Tensor,
    ids: Tensor,
    vocab: int,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Spread logits of the known tokens over the vocabulary; differentiable only if `group` is None.

    Args:
        known: [..., D], any float dtype.
        ids: [D] int64, columns of the known tokens.
        vocab: V; under tensor parallelism V, D and ids are those of this rank's shard.
        temperature: the rollout's, > 0; at this temperature unknown tokens have log-probability OUTSIDE.
        group: ranks that share the vocabulary; None where each rank has all of it.

    Returns:
        [..., V] in the dtype of known.

    >>> logits = spread(torch.tensor([1.0, 1.0]), torch.tensor([0, 2]), 3)
    >>> [f"{q:.1e}" for q in logits.softmax(-1).tolist()]
    ['5.0e-01', '8.8e-27', '5.0e-01']
    """
    scaled = known.to(torch.promote_types(known.dtype, torch.float32)) / temperature
    if group is None:
        lse = scaled.logsumexp(-1, keepdim=True)
    else:
        lse = _lse_over_ranks(scaled, group)

    outside = (temperature * (lse + OUTSIDE)).to(known.dtype)
    return outside.expand(*known.shape[:-1], vocab).index_copy(-1, ids, known)


def _lse_over_ranks(scaled: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Compute the log-sum-exp over all shards, [..., 1]; shards may be empty."""
    lowest = scaled.new_full((*scaled.shape[:-1], 1), torch.finfo(scaled.dtype).min)
    lse = torch.cat((scaled, lowest), -1).logsumexp(-1, keepdim=True)
    largest = lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shares = (lse - largest).exp()
    dist.all_reduce(shares, group=group)
    return largest + shares.log()
