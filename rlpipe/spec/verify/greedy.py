"""Greedy verification of one chain: emits the same tokens as argmax decoding of the target."""

from __future__ import annotations

import torch

from rlpipe.spec.verify.common import leading
from rlpipe.spec.verify.verdict import Verdict


def verify_greedy(draft_tokens: torch.Tensor, target_scores: torch.Tensor) -> Verdict:
    """Accept drafts while d_i = argmax p_i; the next token is the argmax after the accepted drafts.

    draft_tokens: [B, gamma] int64, chosen by any rule. target_scores: [B, gamma + 1, V], logits or
    probabilities; torch.argmax resolves ties. accept_prob: 1.0 if d_i is the argmax, else 0.0.
    Source: LongSpec, greedy verification (temperature 0).
    """
    best = target_scores.argmax(-1)
    agrees = draft_tokens == best[:, :-1]
    num_accepted = leading(agrees)
    next_token = best.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=agrees.float())
