"""Correction of the mismatch between the policy that sampled and the policy that is trained.

One contract for every kind: `correct` returns weights, the mask of the tokens kept, and metrics. Ratios and
divergence masks are verl's, OBRS is `obrs`. They cover precision differences and staleness alike, because
rollout_logprobs are those of the weights that sampled.

Weights lead to the proximal policy of PPO's ratio: weight x ratio = pi / pi_rollout. Rejected tokens have
weight 0 and leave the loss, but still count where it is normalised by the tokens of the global batch; in
metrics over tokens they count as weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlpipe.algo import verl_door
from rlpipe.algo.obrs import ObrsInputs, Verdict, judge, kl_estimates, kl_exact
from rlpipe.algo.own_correction import CorrectionInputs, own_correction
from rlpipe.config.algo import AlgoConfig, Correction, MaskRule, ObrsCalibration, ObrsNormalizer, ObrsTarget
from rlpipe.metrics.values import Max, Mean, Min, Ratio, Value

_LEVEL = {
    Correction.TIS_TOKEN: "token",
    Correction.TIS_SEQUENCE: "sequence",
    Correction.ICEPOP: "token",
}
_SQUARE = "_moment/is_square"
_KAPPA = "rollout_corr/obrs_kappa"

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


def correct(
    *,
    current_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: AlgoConfig,
    obrs: ObrsInputs | None = None,
) -> Corrected:
    """Weights, kept tokens and off-policy metrics of one micro-batch.

    All tensors [B, S], detached; the mask holds at least one 1. current_logprobs: of the policy being
    updated. trainer_logprobs: of the proximal policy. obrs: with correction=obrs. Metrics are
    `rollout_corr/*`; `add_sample_size` completes them once they are reduced.
    Raises ValueError when OBRS is asked for without its inputs, or a custom correction breaks the contract.
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
    if config.correction is Correction.OBRS:
        weights, accepted, obrs_metrics = _obrs(
            current_logprobs, trainer_logprobs, rollout_logprobs, mask, config, obrs
        )
        kept = kept * accepted
        metrics |= obrs_metrics
    if config.correction is Correction.CUSTOM:
        inputs = CorrectionInputs(
            trainer_logprobs=trainer_logprobs,
            rollout_logprobs=rollout_logprobs,
            current_logprobs=current_logprobs,
            mask=mask,
            threshold=config.correction_threshold,
            low=config.correction_low,
        )
        weights, accepted, own_metrics = own_correction(inputs, config)
        kept = kept * accepted
        metrics |= _masked(mask, kept) | own_metrics
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


def next_kappa(metrics: Mapping[str, Value], kappa: float) -> float:
    """The calibration for the next batch, from the reduced metrics of this one.

    kappa: what was used so far; it stays when nothing was sampled or accepted.
    """
    measured = metrics[_KAPPA].value() if _KAPPA in metrics else None
    return measured or kappa


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
    """Of the weights [P] as applied; kept: [P] 1 where a token is."""
    tokens = len(weights)
    metrics: dict[str, Value] = {
        "rollout_corr/rollout_is_mean": Mean(weights.sum().item(), tokens),
        "rollout_corr/rollout_is_max": Max(weights.max().item()),
        "rollout_corr/rollout_is_min": Min(weights.min().item()),
        _SQUARE: Mean(weights.square().sum().item(), tokens),
    }
    if config.correction is Correction.ICEPOP:
        metrics["rollout_corr/rollout_is_oob_ratio"] = Mean(((weights == 0) * kept).sum().item(), tokens)
    elif config.correction not in (Correction.OBRS, Correction.CUSTOM):
        clipped = (weights >= config.correction_threshold).sum().item()
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = Mean(clipped, tokens)
    return metrics


def _obrs(
    current: torch.Tensor,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    config: AlgoConfig,
    inputs: ObrsInputs | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Value]]:
    """Weights min(w, c1) min(p_proximal / p_target, c2) and draws on the grid (Jackpot Eq. 5), metrics."""
    if inputs is None:
        raise ValueError(
            "algo.correction=obrs got no ObrsInputs: the batch carries no top-k logprobs of the rollout. "
            "Collect with SamplingParams.top_logprobs=algo.obrs.top_k."
        )
    where = mask.bool()
    proximal, sampled = trainer[where], rollout[where]
    target = proximal if config.obrs.target is ObrsTarget.REFERENCE else current[where]
    verdict = judge(target, sampled, inputs, config.obrs)
    to_proximal = (proximal - target).exp().clamp(max=config.obrs.c2)
    flat = verdict.weights.clamp(max=config.obrs.c1) * to_proximal
    grid = torch.zeros_like(mask)
    weights, accepted = (grid.masked_scatter(where, x.to(mask.dtype)) for x in (flat, verdict.accepted))
    return weights, accepted, _obrs_metrics(target, sampled, inputs, verdict, config)


def _obrs_metrics(
    target: torch.Tensor, rollout: torch.Tensor, inputs: ObrsInputs, verdict: Verdict, config: AlgoConfig
) -> dict[str, Value]:
    def total(x: torch.Tensor) -> float:
        return x.double().sum().item()

    settings, tokens, accepted = config.obrs, len(target), total(verdict.accepted)
    exact = settings.normalizer is ObrsNormalizer.EXACT
    before, after = kl_exact(inputs, settings.lam) if exact else kl_estimates(target, rollout, verdict)
    estimate, expected = total(verdict.estimate), total(verdict.accept_prob)
    rate = accepted if settings.calibration is ObrsCalibration.ACCEPTED else expected
    truncated = total(verdict.accepted & (verdict.weights > settings.c1))
    return {
        "rollout_corr/obrs_acceptance": Mean(accepted, tokens),
        "rollout_corr/obrs_acceptance_prob": Mean(expected, tokens),
        "rollout_corr/obrs_z": Mean(total(verdict.z), tokens),
        "rollout_corr/obrs_z_ratio": Ratio(estimate, total(verdict.exact) if exact else expected),
        _KAPPA: Ratio(rate, estimate),
        "rollout_corr/obrs_kl_before": Mean(before, tokens),
        "rollout_corr/obrs_kl_after": Mean(after, tokens),
        "rollout_corr/obrs_truncated": Mean(truncated, accepted),
    }
