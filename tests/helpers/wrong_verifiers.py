"""Chain and block verifiers with one planted bug each; a test of losslessness that misses one is no test.

Both families are plain, slow, independent implementations with replaceable parts, row by row. With no
part replaced (`plain`, `plain_block`) they are right, which shows that what fails is the bug.
"""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import Verdict


def _residual(accepted, q, p):
    if accepted == len(q):
        return p[accepted]
    residual = (p[accepted] - q[accepted]).clamp(min=0)
    return residual if residual.sum() > 0 else p[accepted]


def _leading(passed):
    return passed.long().cumprod(1).sum(1)


def _chain(
    doc,
    accept=lambda u, p, q: u * q < p,
    count=_leading,
    residual_of=_residual,
    told=lambda q: q,
    residual_coin=lambda coins, uniforms, accepted: uniforms,
    sample=sample_cdf,
):
    """Rejection sampling.

    accept: (coins, p, q) -> bool, all [B, gamma]. count: passed [B, gamma] -> accepted [B]. residual_of:
    (accepted, q [gamma, V], p [gamma + 1, V]) -> [V], weights of the token after the accepted drafts.
    told: the q it believes. residual_coin: (coins, uniforms, accepted) -> [B]. sample: as `sample_cdf`.
    """

    def verify(
        draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms, *, backend="torch"
    ):
        draft_probs = told(draft_probs)
        picked = draft_tokens.unsqueeze(-1)
        p = target_probs[:, :-1].gather(-1, picked).squeeze(-1)
        q = draft_probs.gather(-1, picked).squeeze(-1)
        accepted = count(accept(accept_uniforms, p, q))
        rows = [residual_of(int(a), draft_probs[i], target_probs[i]) for i, a in enumerate(accepted)]
        uniforms = residual_coin(accept_uniforms, residual_uniforms, accepted)
        return Verdict(
            num_accepted=accepted,
            next_token=sample(torch.stack(rows), uniforms),
            accept_prob=(p / q).clamp(max=1),
        )

    verify.__doc__ = doc
    return verify


def _sample_last(weights, uniforms):
    beyond = weights.double().cumsum(-1) <= (weights.double().sum(-1) * uniforms).unsqueeze(1)
    return beyond.sum(1).clamp(max=weights.shape[1] - 1)


plain = _chain("No bug.")
resample_from_target = _chain(
    "A rejected position is drawn from p, not from the residual.",
    residual_of=lambda accepted, q, p: p[accepted],
)
bonus_from_draft = _chain(
    "The bonus token is drawn from the draft's last distribution.",
    residual_of=lambda accepted, q, p: q[-1] if accepted == len(q) else _residual(accepted, q, p),
)
off_by_one_row = _chain(
    "The residual of a rejection is taken from the next position's target.",
    residual_of=lambda accepted, q, p: _residual(accepted, q, p[1:]) if accepted < len(q) else p[accepted],
)
target_only_coin = _chain(
    "A sampled draft is accepted with probability p, as if it had been the argmax.",
    accept=lambda u, p, q: u < p,
)
absolute_residual = _chain(
    "The residual is |p - q|.",
    residual_of=lambda accepted, q, p: (p[accepted] - q[accepted]).abs() if accepted < len(q) else p[-1],
)
accepts_after_a_rejection = _chain(
    "Counts the drafts that pass, not those before the first that fails.", count=lambda passed: passed.sum(1)
)
one_coin_for_all_depths = _chain(
    "The first coin judges every depth; each marginal acceptance stays right.",
    accept=lambda u, p, q: u[:, :1] * q < p,
)
residual_reuses_the_coin = _chain(
    "The residual's uniform is the coin that rejected (vllm#54282).",
    residual_coin=lambda coins, uniforms, accepted: torch.where(
        accepted < coins.shape[1],
        coins.gather(1, accepted.clamp(max=coins.shape[1] - 1)[:, None])[:, 0],
        uniforms,
    ),
)
temperature_missing_in_q = _chain(
    "q is taken without the temperature 1/2 at which the drafts were sampled.",
    told=lambda q: q.sqrt() / q.sqrt().sum(-1, keepdim=True),
)
bfloat16_q = _chain(
    "q is rounded to bfloat16 after the drafts were sampled from the exact one (DeepSpec#31).",
    told=lambda q: q.bfloat16().double(),
)
lenient_coin = _chain(
    "u * q <= p: a zero coin accepts a token the target forbids (sglang#35771).",
    accept=lambda u, p, q: u * q <= p,
)
falls_back_to_the_last_token = _chain(
    "A uniform that rounding puts at the end of the CDF draws V - 1, whatever its weight.",
    sample=_sample_last,
)

CHAIN_MUTANTS = {
    "resample_from_target": resample_from_target,
    "bonus_from_draft": bonus_from_draft,
    "off_by_one_row": off_by_one_row,
    "target_only_coin": target_only_coin,
    "absolute_residual": absolute_residual,
    "accepts_after_a_rejection": accepts_after_a_rejection,
    "one_coin_for_all_depths": one_coin_for_all_depths,
    "residual_reuses_the_coin": residual_reuses_the_coin,
    "temperature_missing_in_q": temperature_missing_in_q,
    "bfloat16_q": bfloat16_q,
}


def _block(
    doc,
    step=lambda weight, ratio: min(1.0, weight * ratio),
    h=lambda weight, mass: mass / (mass + 1 - weight) if mass > 0 else 0.0,
    scale=lambda weight: weight,
    count=lambda passed: max([0, *(i + 1 for i, ok in enumerate(passed) if ok)]),
    mass_row=lambda i: i,
    bonus=lambda q, p: p[-1],
):
    """Block verification.

    step: (w_{i-1}, r_i) -> w_i. h: (w_i, residual mass) -> threshold. scale: w -> factor of p in the
    residual. count: passed -> accepted. mass_row: index of the rows behind h at depth i. bonus: (q, p) ->
    [V].
    """

    def one(drafts, q, p, coins):
        gamma, weight, weights, passed = len(drafts), 1.0, [], []
        for i, token in enumerate(drafts):
            weight = step(weight, p[i, token].item() / max(q[i, token].item(), 1e-300))
            weights.append(weight)
            limit = weight
            if i + 1 < gamma:
                at = mass_row(i + 1)
                limit = h(weight, (weight * p[at] - q[at]).clamp(min=0).sum().item())
            passed.append(coins[i].item() < limit)
        accepted = count(passed)
        if accepted == gamma:
            return accepted, bonus(q, p), weights
        before = scale([1.0, *weights][accepted])
        residual = (before * p[accepted] - q[accepted]).clamp(min=0)
        return accepted, residual if residual.sum() > 0 else p[accepted], weights

    def verify(
        draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms, *, backend="torch"
    ):
        rows = zip(draft_tokens.tolist(), draft_probs, target_probs, accept_uniforms, strict=True)
        accepted, laws, weights = zip(*(one(*row) for row in rows), strict=True)
        return Verdict(
            num_accepted=torch.tensor(accepted),
            next_token=sample_cdf(torch.stack(laws), residual_uniforms),
            accept_prob=torch.tensor(weights),
        )

    verify.__doc__ = doc
    return verify


def _until_failure(passed):
    return (*passed, False).index(False)


plain_block = _block("No bug.")
BLOCK_MUTANTS = {
    "residual_not_scaled": _block("The residual is max(p - q, 0), without w.", scale=lambda weight: 1.0),
    "coin_against_the_weight": _block("h_i = w_i at every depth.", h=lambda weight, mass: weight),
    "weight_not_capped": _block(
        "w_i = w_{i-1} r_i.",
        step=lambda weight, ratio: weight * ratio,
        h=lambda w, m: m / max(m + 1 - w, 1e-9),
    ),
    "weight_not_running": _block("w_i = min(1, r_i).", step=lambda weight, ratio: min(1.0, ratio)),
    "stops_at_the_first_failure": _block("A failed coin ends the search.", count=_until_failure),
    "mass_of_the_row_before": _block("h_i from the rows of depth i.", mass_row=lambda i: i - 1),
    "bonus_from_draft": _block("The bonus is drawn from q.", bonus=lambda q, p: q[-1]),
}


def typical_acceptance(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms):
    """Accept drafts while p(d) > min(0.09, 0.3 exp(-H(p))), H in nats: Medusa's rule, lossy by design.

    Source: Cai et al. 2401.10774, section 3.3.1. Nothing corrects for the drafts that were accepted.
    """
    rows = target_probs[:, :-1]
    entropy = -torch.xlogy(rows, rows).sum(-1)
    typical = rows.gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1) > (0.3 * (-entropy).exp()).clamp(
        max=0.09
    )
    accepted = _leading(typical)
    last = target_probs[torch.arange(len(accepted)), accepted]
    return Verdict(
        num_accepted=accepted, next_token=sample_cdf(last, residual_uniforms), accept_prob=typical.double()
    )
