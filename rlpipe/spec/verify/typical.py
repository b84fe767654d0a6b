"""Typical acceptance, Medusa's rule: LOSSY, a trade of the target's distribution for longer acceptance.

It is here to be measured against; no lossless mode uses it. Its result is a `LossyVerdict`.
"""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify.common import leading, picked, row
from rlpipe.spec.verify.verdict import LossyVerdict


def verify_typical(
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    residual_uniforms: torch.Tensor | None,
    *,
    epsilon: float,
    delta: float,
) -> LossyVerdict:
    """Accept drafts while p_i(d_i) > min(epsilon, delta * exp(-H(p_i))). LOSSY.

    Source: Medusa (Cai et al. 2401.10774) §3.3.1; its published setting is epsilon = 0.09,
    delta = sqrt(epsilon) = 0.3. H is the entropy in nats. The next token is the target's argmax, as
    Medusa's greedily decoded first token of each step, or a plain sample of the target's row when
    uniforms are given; no residual corrects for the drafts that were accepted.

    draft_tokens: [B, gamma] int64. target_probs: [B, gamma + 1, V]. residual_uniforms: [B] in [0, 1), or
    None for argmax. accept_prob: 1.0 or 0.0. Raises ValueError for thresholds out of range.
    """
    if not 0 < epsilon < 1 or not delta > 0:
        raise ValueError(
            f"epsilon={epsilon}, delta={delta} are no thresholds: set 0 < epsilon < 1 and delta > 0 "
            "(Medusa uses 0.09 and 0.3)."
        )
    rows = target_probs[:, :-1]
    entropy = -torch.xlogy(rows, rows).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    typical = picked(rows, draft_tokens) > threshold
    num_accepted = leading(typical)
    last = row(target_probs, num_accepted)
    next_token = last.argmax(-1) if residual_uniforms is None else sample_cdf(last, residual_uniforms)
    return LossyVerdict(
        num_accepted=num_accepted, next_token=next_token, accept_prob=typical.float(), rule="typical"
    )
