"""Verification of one chain of drafts: rejection sampling and its target-only special case.

Pure functions over probabilities and given uniforms; they draw nothing themselves, so a test can
choose every coin. Both are lossless: the emitted tokens have exactly the target's law.

    draft d_i ~ q_i;  accept while u_i * q_i(d_i) < p_i(d_i)           (strict: q = p = 0 rejects)
    first rejected i:   next ~ max(p_i - q_i, 0), normalised           (only this row is resampled)
    all accepted:       next ~ p_{gamma+1}                             (the bonus token)

Source: Leviathan et al. 2211.17192; Bebop (2606.12370) App. G with the bonus row read as
p_{gamma+1}. Target-only is the same rule with a one-hot q at the drafted token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlpipe.spec.sampling import sample_cdf


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What verification decided.

    num_accepted: [B] int64 in 0..gamma. next_token: [B] int64, emitted after the accepted drafts.
    accept_prob: [B, gamma] min(1, p/q) at each draft, given that all shallower ones were accepted.
    """

    num_accepted: torch.Tensor
    next_token: torch.Tensor
    accept_prob: torch.Tensor


def verify_chain(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    residual_uniforms: torch.Tensor,
    *,
    backend: str = "torch",
) -> Verdict:
    """Rejection sampling of gamma drafts against gamma + 1 target distributions.

    draft_tokens: [B, gamma] int64, sampled from draft_probs. draft_probs: [B, gamma, V].
    target_probs: [B, gamma + 1, V]. accept_uniforms: [B, gamma], residual_uniforms: [B], float64
    in [0, 1), independent of each other and of the drafts. backend: "torch".

    Where rounding leaves a residual of zero mass, the target row itself is sampled.
    Raises ValueError for an unknown backend.
    """
    _check_backend(backend)
    picked = draft_tokens.unsqueeze(-1)
    p = target_probs[:, :-1].gather(-1, picked).squeeze(-1)
    q = draft_probs.gather(-1, picked).squeeze(-1)
    num_accepted = _leading(accept_uniforms * q < p)
    residual = _row(target_probs, num_accepted)
    rejected = (num_accepted < draft_tokens.shape[1]).unsqueeze(1)
    draft_row = _row(draft_probs, num_accepted.clamp(max=draft_tokens.shape[1] - 1))
    corrected = (residual - draft_row * rejected).clamp_(min=0)
    empty = corrected.sum(-1, keepdim=True) <= 0
    next_token = sample_cdf(torch.where(empty, residual, corrected), residual_uniforms)
    return Verdict(
        num_accepted=num_accepted, next_token=next_token, accept_prob=(p / q).nan_to_num_(0.0).clamp_(max=1)
    )


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

    Arguments as in `verify_chain`; draft_probs is not used and may be None, because the rule is
    lossless for any way of choosing the draft from the past.
    """
    _check_backend(backend)
    gamma = draft_tokens.shape[1]
    p = target_probs[:, :-1].gather(-1, draft_tokens.unsqueeze(-1)).squeeze(-1)
    num_accepted = _leading(accept_uniforms < p)
    residual = _row(target_probs, num_accepted)
    rejected = num_accepted < gamma
    drafted = draft_tokens.gather(1, num_accepted.clamp(max=gamma - 1).unsqueeze(1))
    corrected = residual.scatter(1, drafted, residual.gather(1, drafted) * ~rejected.unsqueeze(1))
    empty = corrected.sum(-1, keepdim=True) <= 0
    next_token = sample_cdf(torch.where(empty, residual, corrected), residual_uniforms)
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=p)


def _check_backend(backend: str) -> None:
    if backend != "torch":
        raise ValueError(f"backend={backend!r} is unknown; use 'torch'.")


def _leading(accepted: torch.Tensor) -> torch.Tensor:
    """Number of leading True per row: [B, gamma] bool -> [B] int64."""
    return accepted.long().cumprod(1).sum(1)


def _row(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """probs[b, index[b]]: [B, K, V], [B] -> [B, V]."""
    batch, rows, vocab = probs.shape
    flat = torch.arange(batch, device=probs.device) * rows + index
    return probs.reshape(batch * rows, vocab).index_select(0, flat)
