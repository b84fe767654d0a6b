"""Correction of the mismatch between the policy that sampled and the policy that is trained.

Owns the settings-to-verl translation and the exact reduction of verl's metrics. The importance weight
of a token is min(pi_trainer / pi_rollout, C) (truncated importance sampling); it covers precision
differences and staleness alike, because rollout_logprobs are those of the weights that sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.algo import verl_door
from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.metrics.values import Max, Mean, Min, Value

if TYPE_CHECKING:
    import torch

LEVEL = {Correction.NONE: None, Correction.TIS_TOKEN: "token", Correction.TIS_SEQUENCE: "sequence"}

_SQUARE = "_moment/is_square"

# verl's metric -> what it averages over; the ones left out (std, effective sample size of one
# micro-batch) cannot be combined across micro-batches.
_PER_TOKEN = ("kl", "k3_kl", "chi2_token")
_PER_SEQUENCE = ("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq")


def rollout_correction(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, config: AlgoConfig
) -> tuple[torch.Tensor | None, dict[str, Value]]:
    """Importance weights of one micro-batch and its off-policy metrics.

    All inputs [B, S], detached; the mask holds at least one 1. Returns weights [B, S] (None when the
    correction is off) and `rollout_corr/*`. `add_sample_size` completes the reduced metrics.
    """
    proto, _, metrics = verl_door.rollout_correction(
        old_log_prob=trainer_logprobs,
        rollout_log_prob=rollout_logprobs,
        response_mask=mask,
        rollout_is=LEVEL[config.correction],
        rollout_is_threshold=config.correction_threshold,
    )
    tokens = mask.sum().item()
    sequences = (mask.sum(-1) > 0).sum().item()
    out: dict[str, Value] = {}
    for names, count in ((_PER_TOKEN, tokens), (_PER_SEQUENCE, sequences)):
        for name in names:
            key = f"rollout_corr/{name}"
            if key in metrics:
                out[key] = Mean(metrics[key] * count, count)
    if proto is None:
        return None, out
    weights = proto.batch["rollout_is_weights"]
    chosen = weights[mask.bool()]
    clipped = (chosen >= config.correction_threshold).sum().item()
    out |= {
        "rollout_corr/rollout_is_mean": Mean(chosen.sum().item(), tokens),
        "rollout_corr/rollout_is_max": Max(chosen.max().item()),
        "rollout_corr/rollout_is_min": Min(chosen.min().item()),
        "rollout_corr/rollout_is_ratio_fraction_high": Mean(clipped, tokens),
        _SQUARE: Mean(chosen.square().sum().item(), tokens),
    }
    return weights, out


def add_sample_size(metrics: dict[str, Value]) -> dict[str, Value]:
    """Effective sample size of the importance weights, as a fraction: mean(w)^2 / mean(w^2).

    Needs the sums over all micro-batches and ranks, so it is added after they were reduced.
    """
    square = metrics.pop(_SQUARE, None)
    if square is not None and square.value():
        mean = metrics["rollout_corr/rollout_is_mean"].value()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = Mean(mean**2 / square.value(), 1.0)
    return metrics
