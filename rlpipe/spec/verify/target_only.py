"""Target-only verification of one chain: rejection sampling with a one-hot q at the draft token."""

from __future__ import annotations

import torch

from rlpipe.spec.verify.common import leading, picked, runs_on_kernels, sample_after
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

    Source: Bebop §2.2, Eq. 1. Arguments as in `verify_chain`; draft_probs is not used and may be None. The
    rule is lossless for every way of choosing drafts from earlier tokens.

    accept_prob: p_i(d_i), clamped to 1, given that all shallower drafts were accepted. If rounding rejects a
    draft that has all of the target's mass, the token is sampled from the target row.
    Raises ValueError for an unknown backend.
    """
    if runs_on_kernels(backend):
        from rlpipe.spec.kernels import verify_target_only as launch

        return launch(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms)

    gamma = draft_tokens.shape[1]
    p = picked(target_probs, draft_tokens)
    num_accepted = leading(accept_uniforms < p)
    drafted = draft_tokens.gather(1, num_accepted.clamp(max=gamma - 1).unsqueeze(1))

    def residual(
        rows: slice, _: torch.Tensor | None, target_row: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.scatter(target_row, 1, drafted[rows], 0.0, out=out)

    next_token = sample_after(
        residual, None, target_probs, num_accepted=num_accepted, uniforms=residual_uniforms
    )
    accept_prob = p.nan_to_num(0.0).clamp(max=1)
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=accept_prob)
