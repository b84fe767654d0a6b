"""Verifiers with one planted bug each; a test of losslessness that misses one is not a test."""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import Verdict


def _verifier(doc, accept=lambda u, p, q: u * q < p, residual_of=None):
    """A plain, slow verifier with replaceable parts.

    accept: (coins, p, q) -> bool, all [B, gamma]. residual_of: (accepted, q [gamma, V], p [gamma + 1, V])
    -> [V], the weights of the token after the accepted drafts.
    """
    residual_of = residual_of or _residual

    def verify(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms):
        picked = draft_tokens.unsqueeze(-1)
        p = target_probs[:, :-1].gather(-1, picked).squeeze(-1)
        q = draft_probs.gather(-1, picked).squeeze(-1)
        accepted = accept(accept_uniforms, p, q).long().cumprod(1).sum(1)
        rows = [residual_of(int(a), draft_probs[i], target_probs[i]) for i, a in enumerate(accepted)]
        return Verdict(
            num_accepted=accepted,
            next_token=sample_cdf(torch.stack(rows), residual_uniforms),
            accept_prob=(p / q).clamp(max=1),
        )

    verify.__doc__ = doc
    return verify


def _residual(accepted, q, p):
    if accepted == len(q):
        return p[accepted]
    residual = (p[accepted] - q[accepted]).clamp(min=0)
    return residual if residual.sum() > 0 else p[accepted]


plain = _verifier("No bug: shows that what the mutants fail on is the bug.")
resample_from_target = _verifier(
    "A rejected position is drawn from p, not from the residual.",
    residual_of=lambda accepted, q, p: p[accepted],
)
bonus_from_draft = _verifier(
    "The bonus token is drawn from the draft's last distribution.",
    residual_of=lambda accepted, q, p: q[-1] if accepted == len(q) else _residual(accepted, q, p),
)
off_by_one_row = _verifier(
    "The residual of a rejection is taken from the next position's target.",
    residual_of=lambda accepted, q, p: _residual(accepted, q, p[1:]) if accepted < len(q) else p[accepted],
)
target_only_coin = _verifier(
    "A sampled draft is accepted with probability p, as if it had been the argmax.",
    accept=lambda u, p, q: u < p,
)
lenient_coin = _verifier(
    "u * q <= p: a zero coin accepts a token the target forbids.", accept=lambda u, p, q: u * q <= p
)

MUTANTS = {
    "resample_from_target": resample_from_target,
    "bonus_from_draft": bonus_from_draft,
    "off_by_one_row": off_by_one_row,
    "target_only_coin": target_only_coin,
}
