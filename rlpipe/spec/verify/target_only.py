"""Target-only verification of one chain: rejection sampling with a one-hot q at the drafted token."""

from __future__ import annotations

import torch

from rlpipe.spec.verify.common import draw, kernel, leading, picked, row
from rlpipe.spec.verify.verdict import Verdict


def verify_target_only(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    residual_uniforms: torch.Tensor,
    *,
    backend: str = "torch",
) -> Verdict:
    """Accept a draft with probability p(draft); the residual is p without the draft, normalised.

    Source: Bebop §2.2, Eq. 1. Arguments as in `verify_chain`; draft_probs is not used and may be None,
    because the rule is lossless for any way of choosing the draft from the past.

    accept_prob: p_i(d_i), given that all shallower drafts were accepted. Where the draft holds all of
    the target's mass and is rejected all the same (rounding), the target row itself is sampled.
    Raises ValueError for an unknown backend.
    """
    if fast := kernel(backend, "verify_target_only"):
        return fast(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms)
    gamma = draft_tokens.shape[1]
    p = picked(target_probs[:, :-1], draft_tokens)
    num_accepted = leading(accept_uniforms < p)
    target_row = row(target_probs, num_accepted)
    accepted_all = (num_accepted == gamma).unsqueeze(1)
    drafted = draft_tokens.gather(1, num_accepted.clamp(max=gamma - 1).unsqueeze(1))
    residual = target_row.scatter(1, drafted, target_row.gather(1, drafted) * accepted_all)
    next_token = draw(residual, target_row, residual_uniforms)
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=p)
