"""PPOW: compares windows with their siblings, with a clip and a KL to the target (PPOW §4.1, App. A.2).

**Bias.** The reward of a window d depends on the drafter itself, because a draft is accepted with probability
min(1, p / q). The exact gradient has two terms,

    grad E_d[R] = E_d[ R grad log q(d) ] + E_d[ grad R(d) ]

and PPOW has only the first, as it differentiates only the sampling of d. The second term cancels the first at
every token with q > p (`objectives.exact_window`). So PPOW raises the probability even of tokens that the
drafter already proposes too often, as long as they are accepted often enough. At single positions with random
p and q the cosine between the two gradients is .77 to .82 on average, and it is negative in several percent
of them (tests/unit/drafts/test_exact_window.py). `ppow` is the published objective; `ppow_exact` only adds
the second term (`missing_term`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives.exact_window import speedup
from rlpipe.drafts.windows.reward import expected_reward, proximity_reward, window_reward
from rlpipe.drafts.windows.rollout import Rollout, logprobs_of
from rlpipe.drafts.windows.totals import PpowTotals

DELTA = 1e-6  # makes the advantages of a group with equal rewards 0


@dataclass(slots=True, kw_only=True)
class PpowStats:
    """Detached sums over drafted tokens; divide them by `tokens` for means.

    clipped: tokens for which the clipped term was the smaller one. kl: KL(draft || target), nats. ratio: the
    drafter's probability divided by its probability at the time of drafting.
    """

    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    ratio: Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Compute A_i = (R_i - mean) / (std + delta) over the G windows of each prefix: [..., G] -> same.

    The standard deviation is the population one (divided by G, not G - 1).

    >>> group_advantages(torch.tensor([[0.0, 1.0], [2.0, 2.0]])).round().tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (rewards.std(-1, correction=0, keepdim=True) + DELTA)


def ppow_loss(
    draft_logprobs: Tensor,
    target_logprobs: Tensor,
    tokens: Tensor,
    *,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    clip: float,
    kl_coef: float,
) -> tuple[Tensor, PpowStats]:
    """Compute -J: mean over windows and their K drafts of min(r A, clip(r) A) - beta KL(draft || target).

    draft_logprobs: [N, K, V] of the drafter at each draft, normalised; gradients flow only into this
    argument. target_logprobs: [N, K, V] at the same positions. tokens: [N, K] drafted. behaviour_logprobs:
    [N, K], log-probabilities of the tokens when they were drafted, nats. advantages: [N], one per window.
    clip: r stays in [1 - clip, 1 + clip]. kl_coef: beta.
    Returns the loss, a scalar (0 if there are no windows), and sums.
    """
    log_q, log_p = draft_logprobs.float(), target_logprobs.float().detach()
    chosen = log_q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    ratio = (chosen - behaviour_logprobs).exp()
    advantage = advantages.unsqueeze(-1)
    plain, bounded = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage

    q = log_q.exp()
    kl = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    terms = torch.minimum(plain, bounded) - kl_coef * kl

    stats = PpowStats(
        tokens=torch.tensor(tokens.numel(), device=tokens.device),
        clipped=(bounded < plain).sum(),
        kl=kl.detach().double().sum(),
        ratio=ratio.detach().double().sum(),
    )
    return -terms.sum() / max(1, tokens.numel()), stats


def missing_term(
    draft_logprobs: Tensor,
    target_logprobs: Tensor,
    tokens: Tensor,
    *,
    rewards: Tensor,
    gap: Tensor,
    draft_cost: float,
    config: PpowConfig,
) -> Tensor:
    """Compute the pathwise term of each window, [W, G]; its gradient is the part that PPOW leaves out.

    With R(d) the expectation of the reward over the coins and A = (R - mean) / (std + delta), it is

        (1 - 1/G) R(d) / (std + delta).

    The factor 1 - 1/G is there because the mean of A contains the window's own reward, which shrinks PPOW's
    term by the same factor. The sum of the two terms is the gradient of E[R], divided by a standard
    deviation. The standard deviation is estimated from the sample, so it also weights the anchors. rewards:
    [W, G]. gap: [W, G] from `proximity_gap`, nats. The other tensors: [W, G, K(, V)]. draft_cost: cost of a
    drafted token, in verify steps.
    """
    accept = (logprobs_of(target_logprobs, tokens) - logprobs_of(draft_logprobs, tokens)).clamp(max=0).exp()
    expected = expected_reward(
        accept, gap, draft_cost=draft_cost, proximity=config.proximity, tolerance=config.tolerance
    )
    scale = (1 - 1 / tokens.shape[1]) / (rewards.std(-1, correction=0, keepdim=True) + DELTA)
    return scale * expected


def reward(
    num_accepted: Tensor, accept_prob: Tensor, gap: Tensor, *, draft_cost: float, config: PpowConfig
) -> Tensor:
    """Compute R of each window (§4.3) or, with `ppow.expected_reward`, its expectation over the coins.

    num_accepted: [...]. accept_prob: [..., K] of a chain's `Verdict`. gap: [...], see `proximity_gap`.
    draft_cost: cost of a drafted token, in verify steps.
    """
    rules = {"draft_cost": draft_cost, "proximity": config.proximity, "tolerance": config.tolerance}
    if config.expected_reward:
        return expected_reward(accept_prob, gap, **rules)
    return window_reward(num_accepted, gap, **rules)


def measured_reward(
    num_accepted: Tensor, accept_prob: Tensor, gap: Tensor, *, draft_cost: float, config: PpowConfig
) -> Tensor:
    """Compute a reward from measured costs, (1 + k) / (1 + c K) + 1[k = 0] R_dist (PPOW App. D).

    A step takes the same time for every k, so the measured speed-up is linear in k. Advantages compare
    siblings and divide by their standard deviation. Without R_dist they therefore do not depend on c, and k
    as the reward would give the same advantages. For the arguments see `reward`; draft_cost: the measured c,
    as the report prints it.
    """
    rejected = (num_accepted == 0).float()
    if config.expected_reward:
        num_accepted, rejected = accept_prob.cumprod(-1).sum(-1), 1 - accept_prob[..., 0]

    close = proximity_reward(gap, config.proximity, config.tolerance)
    return speedup(num_accepted, accept_prob.shape[-1], draft_cost) + rejected * close


def windows_loss(
    rollout: Rollout, hard: float, config: PpowConfig, *, exact: bool = False
) -> tuple[Tensor, PpowTotals]:
    """Compute the sum over drafts of the loss, a scalar, and totals.

    hard: the share of windows sampled by score. exact: add `missing_term`.
    """
    log_q, log_p = rollout.logprobs, rollout.target_logprobs[:, :, :-1]
    tokens, verified = rollout.tokens, rollout.verified
    mean, stats = ppow_loss(
        log_q.flatten(0, 1),
        log_p.flatten(0, 1),
        tokens.flatten(0, 1),
        behaviour_logprobs=logprobs_of(log_q.detach(), tokens).flatten(0, 1),
        advantages=group_advantages(verified.rewards).flatten(),
        clip=config.clip,
        kl_coef=config.kl_coef,
    )
    total = mean * stats.tokens

    # The value of the loss stays the published one: only the gradient of the missing term is used.
    if exact:
        missing = missing_term(
            log_q,
            log_p,
            tokens,
            rewards=verified.rewards,
            gap=verified.gap,
            draft_cost=rollout.draft_cost,
            config=config,
        ).sum()
        total = total - (missing - missing.detach())

    return total, PpowTotals.from_rollout(rollout, hard, loss=total, kl=stats.kl, clipped=stats.clipped)
