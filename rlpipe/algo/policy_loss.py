"""The loss of one micro-batch: verl's policy loss, plus entropy bonus and KL penalty when asked for.

Owns how the terms are combined and normalised; every term is verl's. The loss is divided by the totals
of the global batch (all ranks, all micro-batches of one optimizer step), so it does not depend on how
the batch was cut.

Which "old" logprobs. PPO's ratio compares with the policy at the start of the batch. With one optimizer
step per batch that policy is the current one: the old logprobs are the current ones, detached, no extra
forward pass is made, and the ratio is 1 with the gradient of log pi. With several steps (ppo_epochs,
minibatches) a pass before the first step computes them. `algo.proximal` chooses another policy: the current
one always, whose ratio is never clipped, or the one that sampled. What separates trainer and rollout policy
(staleness, precision) is handled by `correction`, not by this ratio: its weights multiply the loss of each
token, and what it masks leaves every term.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from rlpipe.algo import verl_door
from rlpipe.algo.advantage import check_estimator
from rlpipe.algo.correction import Corrected, add_sample_size, correct, make_rule
from rlpipe.config.algo import AlgoConfig, Proximal
from rlpipe.metrics.values import Max, Mean, Sum, Value

if TYPE_CHECKING:
    import torch

    from rlpipe.algo.rule import CorrectionRule, TokenExtras

_MOMENT = "_moment/"


@dataclass(slots=True, kw_only=True)
class LossTotals:
    """Totals of the global batch of one optimizer step. dp_size cancels the mean over ranks."""

    tokens: float
    sequences: float
    dp_size: int

    def for_verl(self, config: AlgoConfig) -> dict[str, float | None]:
        """Under the names verl's aggregation reads."""
        return {
            "dp_size": self.dp_size,
            "batch_num_tokens": self.tokens,
            "global_batch_size": self.sequences,
            "loss_scale_factor": config.loss_scale_factor,
        }


def micro_batch_loss(
    *,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    totals: LossTotals,
    config: AlgoConfig,
    rule: CorrectionRule | None = None,
    extras: TokenExtras | None = None,
) -> tuple[torch.Tensor, dict[str, Value]]:
    """Loss (scalar, its gradient summed over micro-batches is the batch's) and metrics.

    All tensors [B, S] float32, zero where mask is 0; logprobs and entropies carry the graph.
    old_logprobs: of the trainer at the start of the batch. rule, extras: see `correct`.
    """
    tokens = mask.sum().item()
    if tokens == 0:  # an empty micro-batch, there to keep the ranks in step
        return (logprobs * mask).sum(), {"perf/train_tokens": Sum(0)}
    current = logprobs.detach()
    trainer = current if config.proximal is Proximal.CURRENT else old_logprobs
    corrected = correct(
        current_logprobs=current,
        trainer_logprobs=trainer,
        rollout_logprobs=rollout_logprobs,
        mask=mask,
        config=config,
        rule=rule,
        extras=extras,
    )
    metrics = corrected.metrics | _probability_gap(trainer, rollout_logprobs, mask)
    metrics["perf/train_tokens"] = Sum(tokens)
    metrics["actor/entropy"] = Mean((entropies.detach() * mask).sum().item(), tokens)
    if not corrected.mask.any():
        return (logprobs * corrected.mask).sum(), metrics
    proximal = rollout_logprobs if config.proximal is Proximal.ROLLOUT else trainer
    loss, terms = _loss(
        logprobs, entropies, proximal, advantages, reference_logprobs, corrected, totals, config
    )
    return loss, metrics | terms


def _loss(
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None,
    corrected: Corrected,
    totals: LossTotals,
    config: AlgoConfig,
) -> tuple[torch.Tensor, dict[str, Value]]:
    """Policy loss, entropy bonus and KL penalty over the kept tokens, and their metrics."""
    info = totals.for_verl(config)
    mask, mode = corrected.mask, config.loss_agg.value
    kept = mask.sum().item()
    loss, verl_metrics = verl_door.policy_loss(config.policy_loss)(
        old_log_prob=proximal,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=verl_door.actor_config(config, info),
        rollout_is_weights=corrected.weights,
    )
    metrics: dict[str, Value] = {name: Mean(value * kept, kept) for name, value in verl_metrics.items()}
    metrics["actor/pg_loss"] = _share(loss, totals)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * verl_door.agg_loss(entropies, mask, mode, **info)
    if reference is not None:
        kl = verl_door.kl_penalty(logprobs, reference, config.kl_kind.value)
        kl_loss = verl_door.agg_loss(kl, mask, mode, **info)
        loss = loss + config.kl_coef * kl_loss
        metrics["actor/kl_loss"] = _share(kl_loss, totals)
    return loss, metrics


def distillation_loss(
    divergence: torch.Tensor, mask: torch.Tensor, totals: LossTotals, config: AlgoConfig
) -> tuple[torch.Tensor, Value]:
    """Divergences of tokens [B, S] as a loss, aggregated as the policy's is (Jackpot Eq. 7: their mean).

    Returns it and, for its metric, this micro-batch's share (see `_share`).
    """
    loss = verl_door.agg_loss(divergence, mask, config.loss_agg.value, **totals.for_verl(config))
    return loss, _share(loss, totals)


def optimizer_step_count(config: AlgoConfig) -> dict[str, Value]:
    """Counts one optimizer step in the metrics whose micro-batches report shares (see `_share`)."""
    names = ["actor/pg_loss"] + ["actor/kl_loss"] * bool(config.kl_coef)
    return {name: Mean(0.0, 1.0) for name in names}


def finish(metrics: dict[str, Value]) -> dict[str, Value]:
    """Turn the raw moments gathered over all micro-batches and ranks into the metrics they stand for.

    Pearson correlation of the probabilities that rollout and trainer give to the sampled tokens.
    """
    moments = {name: metrics.pop(_MOMENT + name, None) for name in ("x", "y", "xx", "yy", "xy")}
    if moments["x"] is not None:
        x, y, xx, yy, xy = (m.value() for m in moments.values())
        spread = sqrt(max(xx - x * x, 0.0) * max(yy - y * y, 0.0))
        correlation = (xy - x * y) / spread if spread else 1.0
        metrics["training/rollout_actor_probs_pearson_corr"] = Mean(correlation, 1.0)
    return add_sample_size(metrics)


def _share(loss: torch.Tensor, totals: LossTotals) -> Mean:
    """A micro-batch's share of a loss that is summed over micro-batches and averaged over steps.

    It counts nothing itself; `optimizer_step_count` does, once per step.
    """
    return Mean(loss.item() / totals.dp_size, 0.0)


def _probability_gap(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, Value]:
    chosen = mask.bool()
    x, y = rollout[chosen].double().exp(), trainer[chosen].double().exp()
    n, gap = len(x), (x - y).abs()
    sums = {"x": x.sum(), "y": y.sum(), "xx": x @ x, "yy": y @ y, "xy": x @ y}
    return {
        "training/rollout_probs_diff_mean": Mean(gap.sum().item(), n),
        "training/rollout_probs_diff_max": Max(gap.max().item()),
        **{_MOMENT + name: Mean(value.item(), n) for name, value in sums.items()},
    }


def check_names(config: AlgoConfig) -> None:
    """Refuse names that are unknown or cannot be used, at launch. Raises ValueError with the registered ones,
    or saying why a user's correction cannot be imported."""
    verl_door.policy_loss(config.policy_loss)
    check_estimator(config)
    make_rule(config)
