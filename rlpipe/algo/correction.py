"""Corrects the mismatch between the policy that sampled the tokens and the policy that is trained.

Every kind of correction has the same contract: `correct` returns weights, the mask of the accepted tokens,
and metrics. verl computes ratios and divergence masks; every other kind is a `CorrectionRule` with a row in
`RULES`. All kinds correct both precision differences and staleness, because rollout_logprobs come from the
weights that sampled the tokens.

A weight is the ratio of PPO's proximal policy to the rollout policy, so weight x PPO's ratio = pi /
pi_rollout. Rejected tokens have weight 0 and are left out of the loss, but still count in its normalisation
by the tokens of the global batch. In metrics over tokens they count with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.algo import verl_door
from rlpipe.algo.obrs import Obrs, ObrsMask, ObrsWeight
from rlpipe.algo.rule import CorrectionInputs, CorrectionRule, TokenExtras
from rlpipe.algo.user_correction import UserCorrection
from rlpipe.config.algo import AlgoConfig, Correction, MaskRule
from rlpipe.metrics.values import Max, Mean, Min, Value
from rlpipe.types import Trajectory

# To add a correction, write a file with a subclass of `CorrectionRule`, import it above, and add a row here.
RULES: dict[Correction, type[CorrectionRule]] = {
    Correction.OBRS: Obrs,
    Correction.OBRS_MASK: ObrsMask,
    Correction.OBRS_WEIGHT: ObrsWeight,
    Correction.USER: UserCorrection,
}

_LEVEL = {
    Correction.TIS_TOKEN: "token",
    Correction.TIS_SEQUENCE: "sequence",
    Correction.ICEPOP: "token",
}
_SQUARE = "_moment/is_square"

# verl's metrics by what they average over. Others (std, effective sample size of one micro-batch) are left
# out, because they cannot be combined across micro-batches.
_PER_TOKEN = ("kl", "k3_kl", "chi2_token")
_PER_SEQUENCE = ("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq")


@dataclass(slots=True, kw_only=True)
class Corrected:
    """weights: [B, S] without a graph, 0 where mask is 0; None: all ones. mask: [B, S] accepted tokens."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, Value]


def make_rule(config: AlgoConfig) -> CorrectionRule | None:
    """Create the rule of `algo.correction`; None if verl computes it from the two logprobs of a token.

    Raises ValueError if a user's rule cannot be imported.
    """
    rule = RULES.get(config.correction)
    return None if rule is None else rule(config)


def top_logprobs(config: AlgoConfig, vocab_size: int) -> int:
    """Return how many logprobs the engine must return with each sampled token."""
    rule = make_rule(config)
    return 0 if rule is None else rule.top_logprobs(vocab_size)


def token_data(rule: CorrectionRule | None, trajectories: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    """Collect the token data that a rule needs, as arguments of `pack`. seed: the run's seed."""
    if rule is None:
        return {}
    return {
        "columns": [rule.columns(t, seed) for t in trajectories],
        "candidates": rule.needs_candidates,
    }


def correct(
    *,
    current_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: AlgoConfig,
    rule: CorrectionRule | None = None,
    extras: TokenExtras | None = None,
) -> Corrected:
    """Compute weights, accepted tokens and off-policy metrics of one micro-batch.

    All tensors are [B, S] and detached; the mask has at least one 1. The logprobs are of the policy being
    updated (current), the proximal policy (trainer) and the policy that sampled (rollout). rule: the result
    of `make_rule(config)`, which has a state. extras: the data that the rule declared. Metrics are
    `rollout_corr/*`; `add_sample_size` completes them after their reduction. Raises ValueError when a rule
    lacks data that it needs, or breaks the contract.
    """
    threshold: float | str = config.correction_threshold
    if config.correction is Correction.ICEPOP:
        threshold = f"{config.correction_low}_{config.correction_threshold}"

    proto, accepted, verl_metrics = verl_door.rollout_correction(
        old_log_prob=trainer_logprobs,
        rollout_log_prob=rollout_logprobs,
        response_mask=mask,
        rollout_is=_LEVEL.get(config.correction),
        rollout_is_threshold=threshold,
        rollout_rs=None if config.mask is MaskRule.NONE else config.mask.value,
        rollout_rs_threshold=_mask_bounds(config),
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    metrics = _divergences(verl_metrics, mask)
    if config.mask is not MaskRule.NONE:
        metrics |= _masked(mask, accepted)

    # A rule computes weights, and rejects more tokens in addition to those that verl's mask rejected.
    if rule is not None:
        inputs = CorrectionInputs(
            trainer_logprobs=trainer_logprobs,
            rollout_logprobs=rollout_logprobs,
            current_logprobs=current_logprobs,
            mask=mask,
            threshold=config.correction_threshold,
            low=config.correction_low,
            extras=extras or TokenExtras(),
        )
        result = rule.weigh(inputs)
        weights, count = result.weights, result.mask.sum().item()
        accepted = accepted * result.mask

        if rule.counts_masked:
            metrics |= _masked(mask, accepted)
        for name, value in result.metrics.items():
            mean = value if isinstance(value, Value) else Mean(float(value) * count, count)
            metrics[f"rollout_corr/{name}"] = mean

    if weights is not None:
        weights = weights * accepted
        metrics |= _weight_metrics(weights[mask.bool()], accepted[mask.bool()], config)
    return Corrected(weights=weights, mask=accepted, metrics=metrics)


def add_sample_size(metrics: dict[str, Value]) -> dict[str, Value]:
    """Add the effective sample size of the importance weights, a fraction: mean(w)^2 / mean(w^2).

    It needs sums over all micro-batches and ranks, so call this with the reduced metrics.
    """
    square = metrics.pop(_SQUARE, None)
    if square is not None and square.value():
        mean = metrics["rollout_corr/rollout_is_mean"].value()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = Mean(mean**2 / square.value(), 1.0)
    return metrics


def _mask_bounds(config: AlgoConfig) -> str | None:
    """Return the bounds of `config.mask` in verl's notation."""
    if config.mask is MaskRule.NONE:
        return None

    # Only k1 can be negative, so only k1 has a lower bound.
    if not config.mask.value.endswith("k1"):
        return str(config.mask_high)
    low = 1 / config.mask_high if config.mask_low is None else config.mask_low
    return f"{low}_{config.mask_high}"


def _divergences(verl_metrics: dict[str, float], mask: torch.Tensor) -> dict[str, Value]:
    """Return verl's divergences of rollout and trainer, each as a mean with its count."""
    counts = {_PER_TOKEN: mask.sum().item(), _PER_SEQUENCE: (mask.sum(-1) > 0).sum().item()}
    return {
        f"rollout_corr/{name}": Mean(verl_metrics[f"rollout_corr/{name}"] * count, count)
        for names, count in counts.items()
        for name in names
    }


def _masked(mask: torch.Tensor, accepted: torch.Tensor) -> dict[str, Value]:
    """Compute the shares of rejected tokens, and of trajectories with a rejected token."""
    rejected = (mask - accepted) > 0
    return {
        "rollout_corr/rollout_rs_masked_fraction": Mean(rejected.sum().item(), mask.sum().item()),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean(
            rejected.any(-1).sum().item(), (mask.sum(-1) > 0).sum().item()
        ),
    }


def _weight_metrics(weights: torch.Tensor, accepted: torch.Tensor, config: AlgoConfig) -> dict[str, Value]:
    """Compute metrics of the applied weights [P]. accepted: [P], 1 for tokens that are trained on."""
    tokens = len(weights)
    metrics: dict[str, Value] = {
        "rollout_corr/rollout_is_mean": Mean(weights.sum().item(), tokens),
        "rollout_corr/rollout_is_max": Max(weights.max().item()),
        "rollout_corr/rollout_is_min": Min(weights.min().item()),
        _SQUARE: Mean(weights.square().sum().item(), tokens),
    }

    if config.correction is Correction.ICEPOP:
        metrics["rollout_corr/rollout_is_oob_ratio"] = Mean(((weights == 0) * accepted).sum().item(), tokens)
    elif config.correction not in RULES:
        clipped = (weights >= config.correction_threshold).sum().item()
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = Mean(clipped, tokens)
    return metrics
