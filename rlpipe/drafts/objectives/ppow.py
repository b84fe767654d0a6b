"""PPOW: windows against their siblings, clipped, anchored to the target (PPOW §4.1, App. A.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.windows.rollout import Rollout, logprobs_of
from rlpipe.drafts.windows.totals import PpowTotals, Total

DELTA = 1e-6  # keeps the advantage of a group with equal rewards 0


@dataclass(slots=True, kw_only=True)
class PpowStats:
    """Sums over drafted tokens, detached: divide by `tokens`.

    clipped: tokens whose clipped term was the smaller. kl: KL(draft || target), nats. ratio: of the
    drafter's probability to that at the time of drafting.
    """

    tokens: Tensor
    clipped: Tensor
    kl: Tensor
    ratio: Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Compute A_i = (R_i - mean) / (std + delta) over the G windows of each prefix. [..., G] -> same.

    The standard deviation is that of the group itself (divided by G).

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

    draft_logprobs: [N, K, V] of the drafter after the drafts before, normalised; gradients flow into it
    only. target_logprobs: [N, K, V] at the same positions. tokens: [N, K] drafted. behaviour_logprobs:
    [N, K], of the tokens when they were drafted. advantages: [N], one per window.
    Returns a scalar, 0 for no windows, and sums.
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


def windows_loss(rollout: Rollout, hard: float, config: PpowConfig) -> tuple[Tensor, PpowTotals]:
    """Compute the sum over drafts of the loss, a scalar, and totals.

    hard: the share of windows sampled by score.
    """
    log_q, tokens, verified = rollout.logprobs, rollout.tokens, rollout.verified
    mean, stats = ppow_loss(
        log_q.flatten(0, 1),
        verified.logprobs.flatten(0, 1),
        tokens.flatten(0, 1),
        behaviour_logprobs=logprobs_of(log_q.detach(), tokens).flatten(0, 1),
        advantages=group_advantages(verified.rewards).flatten(),
        clip=config.clip,
        kl_coef=config.kl_coef,
    )
    total, group = mean * stats.tokens, verified.rewards.shape[1]
    even = (verified.rewards == verified.rewards[:, :1]).all(1, keepdim=True).expand_as(verified.rewards)

    sums = {
        Total.WINDOWS: verified.rewards.numel(),
        Total.DRAFTS: stats.tokens,
        Total.LOSS: total.detach(),
        Total.REWARD: verified.rewards.sum(),
        Total.ACCEPTED: verified.num_accepted.sum(),
        Total.REJECTED: (verified.num_accepted == 0).sum(),
        Total.CLOSE: verified.close.sum(),
        Total.EVEN: even.sum(),
        Total.KL: stats.kl,
        Total.CLIPPED: stats.clipped,
        Total.SCORE: rollout.windows.scores.sum() * group,
        Total.HARD: hard * verified.rewards.numel(),
    }
    return total, PpowTotals.from_values(sums, log_q.device)
