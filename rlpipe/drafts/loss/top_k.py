"""A vocabulary reduced to the target's top K tokens and one bucket for the rest, with bounds of the overlap.

With A the target's top K:   sum_A min(p, q)  <=  alpha  <=  sum_A min(p, q) + min(p(rest), q(rest)),
because merging tokens can only raise their overlap. Probabilities of A are exact: q is normalised over the
whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlpipe.drafts.loss.torch_rows import compute_dtype


def bucketed(draft: Tensor, target: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the target's top K and of the rest, last: two [N, K, top_k + 1].

    draft, target: [N, K, V]; differentiable in draft. Raises ValueError unless 1 <= top_k < V.
    """
    if not 1 <= top_k < target.shape[-1]:
        raise ValueError(f"top_k must be in 1..V - 1 = {target.shape[-1] - 1}, got {top_k}.")
    chosen = target.topk(top_k, dim=-1).indices
    draft, target = (logits.to(compute_dtype(logits)) / temperature for logits in (draft, target))
    return _with_rest(draft, chosen), _with_rest(target, chosen)


def lower_bound(draft: Tensor, target: Tensor) -> Tensor:
    """[N, K] overlap of bucketed log-probabilities without the bucket; detached."""
    return torch.minimum(draft.detach(), target)[..., :-1].exp().sum(-1)


def _with_rest(scaled: Tensor, chosen: Tensor) -> Tensor:
    inside = scaled.gather(-1, chosen)
    outside = scaled.scatter(-1, chosen, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([inside, outside], -1) - scaled.logsumexp(-1, keepdim=True)
