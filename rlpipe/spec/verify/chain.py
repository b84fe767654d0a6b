"""Rejection sampling of one chain of drafts, token by token.

Pure functions over probabilities and given uniforms; they draw nothing themselves, so a test can
choose every coin.

    draft d_i ~ q_i;  accept while u_i * q_i(d_i) < p_i(d_i)           (strict: p = 0 always rejects)
    first rejected i:   next ~ max(p_i - q_i, 0), normalised           (only this row is resampled)
    all accepted:       next ~ p_{gamma+1}                             (the bonus token)

Source: Leviathan et al. 2211.17192; Bebop (2606.12370) App. G with the bonus row read as p_{gamma+1}.
The two functions differ in how the last token is drawn: by inverting the CDF (Bebop Alg. 3) or by
Gumbel-max (Bebop Alg. 4). Their laws are equal.
"""

from __future__ import annotations

import torch

from rlpipe.spec.verify.common import draw_after, kernel, leading, picked, weights_after
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
    """Rejection sampling of gamma drafts against gamma + 1 target distributions (Bebop Alg. 3).

    draft_tokens: [B, gamma] int64, sampled from draft_probs. draft_probs: [B, gamma, V].
    target_probs: [B, gamma + 1, V]. accept_uniforms: [B, gamma], residual_uniforms: [B], float64
    in [0, 1), independent of each other and of the drafts. backend: "torch" or "triton".

    accept_prob: min(1, p_i(d_i) / q_i(d_i)), given that all shallower drafts were accepted. A draft with
    q = 0 is accepted if p > 0. Where rounding leaves a residual of zero mass, the target row itself is
    sampled. Raises ValueError for an unknown backend.
    """
    if fast := kernel(backend, "verify_chain"):
        return fast(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms)
    num_accepted, accept_prob = _accept(draft_tokens, draft_probs, target_probs, accept_uniforms)
    next_token = draw_after(_residual, draft_probs, target_probs, num_accepted, residual_uniforms)
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=accept_prob)


def verify_chain_gumbel(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    gumbel_uniforms: torch.Tensor,
) -> Verdict:
    """`verify_chain` with the last token by Gumbel-max (Bebop Alg. 4); equal in law, not per uniform.

        next = argmax_v [log w(v) - log(-log u_v)],  w = the residual, or p_{gamma+1}

    gumbel_uniforms: [B, V], clamped off 0 and 1, independent of coins and drafts (noise shared with the
    drafter's own Gumbel-max breaks the law), so that noise is finite and tokens with w = 0 cannot win.
    """
    num_accepted, accept_prob = _accept(draft_tokens, draft_probs, target_probs, accept_uniforms)
    weights = weights_after(_residual, draft_probs, target_probs, num_accepted).double()
    uniforms = gumbel_uniforms.double().clamp(torch.finfo(torch.float64).tiny, 1 - 2**-53)
    scores = weights.log() - uniforms.log().neg().log()
    return Verdict(num_accepted=num_accepted, next_token=scores.argmax(-1), accept_prob=accept_prob)


def _accept(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """num_accepted [B] and accept_prob [B, gamma]."""
    p, q = picked(target_probs, draft_tokens), picked(draft_probs, draft_tokens)
    return leading(coins * q < p), (p / q).nan_to_num_(0.0).clamp_(max=1)


def _residual(
    rows: slice, draft_row: torch.Tensor, target_row: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """max(p - q, 0)."""
    return torch.sub(target_row, draft_row, out=out).clamp_(min=0)
