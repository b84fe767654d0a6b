"""Correction of the mismatch between the policy that sampled and the policy that is trained.

One contract for every kind: `correct` returns weights, the mask of the tokens kept, and metrics. Ratios and
divergence masks are verl's; every other kind is a `CorrectionRule` that `_RULES` names. They cover precision
differences and staleness alike, because rollout_logprobs are those of the weights that sampled.

Weights lead to the proximal policy of PPO's ratio: weight x ratio = pi / pi_rollout. Rejected tokens have
weight 0 and leave the loss, but still count where it is normalised by the tokens of the global batch; in
metrics over tokens they count as weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.algo import verl_door
from rlpipe.algo.obrs import Obrs
from rlpipe.algo.rule import CorrectionInputs, CorrectionRule, TokenExtras
from rlpipe.algo.user_correction import UserCorrection
from rlpipe.config.algo import AlgoConfig, Correction, MaskRule
from rlpipe.metrics.values import Max, Mean, Min, Value
from rlpipe.types import Trajectory

_RULES = {Correction.OBRS: Obrs, Correction.USER: UserCorrection}

_LEVEL = {
    Correction.TIS_TOKEN: "token",
    Correction.TIS_SEQUENCE: "sequence",
    Correction.ICEPOP: "token",
}
_SQUARE = "_moment/is_square"

# verl's metric -> what it averages over; the ones left out (std, effective sample size of one
# micro-batch) cannot be combined across micro-batches.
_PER_TOKEN = ("kl", "k3_kl", "chi2_token")
_PER_SEQUENCE = ("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq")


@dataclass(slots=True, kw_only=True)
class Corrected:
    """weights: [B, S] without a graph, 0 where mask is 0; None stands for ones. mask: [B, S] tokens kept."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, Value]


def make_rule(config: AlgoConfig) -> CorrectionRule | None:
    """The rule of `algo.correction`; None for those that verl computes from the two logprobs of a token.

    Raises ValueError for a user's that cannot be imported.
    """
    rule = _RULES.get(config.correction)
    return None if rule is None else rule(config)


def top_logprobs(config: AlgoConfig, vocab_size: int) -> int:
    """How many logprobs the engine returns with each sampled token."""
    rule = make_rule(config)
    return 0 if rule is None else rule.top_logprobs(vocab_size)


def token_data(rule: CorrectionRule | None, trajectories: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    """What the packing lays out for a rule, as options of `pack`; seed: the run's."""
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
    """Weights, kept tokens and off-policy metrics of one micro-batch.

    All tensors [B, S], detached; the mask holds at least one 1. current_logprobs: of the policy being
    updated. trainer_logprobs: of the proximal policy. rule: `make_rule(config)`, with what it remembers;
    extras: what it asked for. Metrics are `rollout_corr/*`; `add_sample_size` completes them once they are
    reduced. Raises ValueError when a rule lacks what it needs, or breaks the contract.
    """
    threshold: float | str = config.correction_threshold
    if config.correction is Correction.ICEPOP:
        threshold = f"{config.correction_low}_{config.correction_threshold}"
    proto, kept, verl_metrics = verl_door.rollout_correction(
        old_log_prob=trainer_logprobs,
        rollout_log_prob=rollout_logprobs,
        response_mask=mask,
        rollout_is=_LEVEL.get(config.correction),
        rollout_is_threshold=threshold,
        rollout_rs=None if config.mask is MaskRule.NONE else config.mask.value,
        rollout_rs_threshold=_mask_bounds(config),
    )
    metrics = _divergences(verl_metrics, mask)
    if config.mask is not MaskRule.NONE:
        metrics |= _masked(mask, kept)
    weights = None if proto is None else proto.batch["rollout_is_weights"]
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
        kept = kept * result.mask
        if rule.counts_masked:
            metrics |= _masked(mask, kept)
        for name, value in result.metrics.items():
            mean = value if isinstance(value, Value) else Mean(float(value) * count, count)
            metrics[f"rollout_corr/{name}"] = mean
    if weights is not None:
        weights = weights * kept
        metrics |= _weight_metrics(weights[mask.bool()], kept[mask.bool()], config)
    return Corrected(weights=weights, mask=kept, metrics=metrics)


def add_sample_size(metrics: dict[str, Value]) -> dict[str, Value]:
    """Effective sample size of the importance weights, as a fraction: mean(w)^2 / mean(w^2).

    Needs the sums over all micro-batches and ranks, so it is added after they were reduced.
    """
    square = metrics.pop(_SQUARE, None)
    if square is not None and square.value():
        mean = metrics["rollout_corr/rollout_is_mean"].value()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = Mean(mean**2 / square.value(), 1.0)
    return metrics


def _mask_bounds(config: AlgoConfig) -> str | None:
    """verl's spelling of the bounds of `config.mask`."""
    if config.mask is MaskRule.NONE:
        return None
    if not config.mask.value.endswith("k1"):
        return str(config.mask_high)
    low = 1 / config.mask_high if config.mask_low is None else config.mask_low
    return f"{low}_{config.mask_high}"


def _divergences(verl_metrics: dict[str, float], mask: torch.Tensor) -> dict[str, Value]:
    """verl's divergences of rollout and trainer, with what each averages over."""
    counts = {_PER_TOKEN: mask.sum().item(), _PER_SEQUENCE: (mask.sum(-1) > 0).sum().item()}
    return {
        f"rollout_corr/{name}": Mean(verl_metrics[f"rollout_corr/{name}"] * count, count)
        for names, count in counts.items()
        for name in names
    }


def _masked(mask: torch.Tensor, kept: torch.Tensor) -> dict[str, Value]:
    """Shares of tokens, and of trajectories with a token, that were left out."""
    lost = (mask - kept) > 0
    return {
        "rollout_corr/rollout_rs_masked_fraction": Mean(lost.sum().item(), mask.sum().item()),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean(
            lost.any(-1).sum().item(), (mask.sum(-1) > 0).sum().item()
        ),
    }


def _weight_metrics(weights: torch.Tensor, kept: torch.Tensor, config: AlgoConfig) -> dict[str, Value]:
    """Metrics of the weights [P] that are applied; kept: [P], 1 where a token is trained on."""
    tokens = len(weights)
    metrics: dict[str, Value] = {
        "rollout_corr/rollout_is_mean": Mean(weights.sum().item(), tokens),
        "rollout_corr/rollout_is_max": Max(weights.max().item()),
        "rollout_corr/rollout_is_min": Min(weights.min().item()),
        _SQUARE: Mean(weights.square().sum().item(), tokens),
    }
    if config.correction is Correction.ICEPOP:
        metrics["rollout_corr/rollout_is_oob_ratio"] = Mean(((weights == 0) * kept).sum().item(), tokens)
    elif config.correction not in _RULES:
        clipped = (weights >= config.correction_threshold).sum().item()
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = Mean(clipped, tokens)
    return metrics
