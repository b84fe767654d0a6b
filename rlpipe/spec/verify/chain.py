"""Rejection sampling of one chain of drafts, token by token.

A pure function of probabilities and uniforms. It generates no random numbers, so a test can set every coin.

    draft d_i ~ q_i;  accept while u_i * q_i(d_i) < p_i(d_i)           (strict: p = 0 always rejects)
    first rejected i:   next ~ max(p_i - q_i, 0), normalised           (only this row is resampled)
    all accepted:       next ~ p_{gamma+1}                             (the bonus token)

Source: Leviathan et al. 2211.17192; Bebop (2606.12370) App. G, taking its bonus row as p_{gamma+1}.
The last token is sampled by inverting the CDF (Bebop Alg. 3).
"""

from __future__ import annotations

import torch

from rlpipe.spec.verify.common import leading, picked, runs_on_kernels, sample_after
from rlpipe.spec.verify.verdict import Verdict


def verify_chain(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    residual_uniforms: torch.Tensor,
    *,
    backend: str = "torch",
) -> Verdict:
    """Verify gamma drafts against gamma + 1 target distributions by rejection sampling (Bebop Alg. 3).

    draft_tokens: [B, gamma] int64, sampled from draft_probs. draft_probs: [B, gamma, V].
    target_probs: [B, gamma + 1, V]. accept_uniforms: [B, gamma], residual_uniforms: [B], float64
    in [0, 1), independent of each other and of the drafts. backend: "torch" or "triton".

    accept_prob: min(1, p_i(d_i) / q_i(d_i)), given that all shallower drafts were accepted. A draft with
    q = 0 is accepted if p > 0. If rounding leaves the residual without mass, the token is sampled from the
    target row. Raises ValueError for an unknown backend.
    """
    if runs_on_kernels(backend):
        from rlpipe.spec.kernels import verify_chain as launch

        return launch(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms)

    p, q = picked(target_probs, draft_tokens), picked(draft_probs, draft_tokens)
    num_accepted = leading(accept_uniforms * q < p)
    accept_prob = (p / q).nan_to_num_(0.0).clamp_(max=1)

    next_token = sample_after(
        _residual, draft_probs, target_probs, num_accepted=num_accepted, uniforms=residual_uniforms
    )
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=accept_prob)


def _residual(
    _: slice, draft_row: torch.Tensor | None, target_row: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Compute max(p - q, 0)."""
    assert draft_row is not None, "rejection sampling reads the draft's distributions"
    return torch.sub(target_row, draft_row, out=out).clamp_(min=0)
