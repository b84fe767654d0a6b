"""Rejection sampling with the last token by Gumbel-max: equal to `verify_chain` in law, not per uniform."""

from __future__ import annotations

import torch

from rlpipe.spec.verify import Verdict
from rlpipe.spec.verify.common import leading, picked, weights_after


def verify_chain_gumbel(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    gumbel_uniforms: torch.Tensor,
) -> Verdict:
    """Verify a chain by Bebop Alg. 4.

        next = argmax_v [log w(v) - log(-log u_v)],  w = the residual, or p_{gamma+1}

    gumbel_uniforms: [B, V], clamped off 0 and 1, independent of coins and drafts (noise shared with the
    drafter's own Gumbel-max breaks the law), so that noise is finite and tokens with w = 0 cannot win.
    """

    def residual(rows, draft_row, target_row, out):
        return torch.sub(target_row, draft_row, out=out).clamp_(min=0)

    p, q = picked(target_probs, draft_tokens), picked(draft_probs, draft_tokens)
    num_accepted = leading(accept_uniforms * q < p)
    weights = weights_after(residual, draft_probs, target_probs, num_accepted=num_accepted).double()
    uniforms = gumbel_uniforms.double().clamp(torch.finfo(torch.float64).tiny, 1 - 2**-53)
    scores = weights.log() - uniforms.log().neg().log()
    accept_prob = (p / q).nan_to_num(0.0).clamp(max=1)
    return Verdict(num_accepted=num_accepted, next_token=scores.argmax(-1), accept_prob=accept_prob)
