"""The loss of one micro-batch: verl's policy loss, plus entropy bonus and KL penalty if configured.

Owns how the terms are combined and normalised; verl computes every term. The loss is divided by the totals
of the global batch (all ranks, all micro-batches of one optimizer step), so it does not depend on how
the batch was cut. Bebop Eq. 3 (GRPO) averages within each answer first (`algo.loss_agg=seq-mean-token-mean`);
the default here is the mean over all tokens.

Which "old" logprobs. PPO's ratio is relative to the policy at the start of the batch. With one optimizer step
per batch, this is the current policy, so the old logprobs are the current logprobs, detached. This needs no
extra forward pass, and the ratio is 1 with the gradient of log pi. With several steps (ppo_epochs,
minibatches), a pass before the first step computes the old logprobs. `algo.proximal` selects another policy:
always the current one (the ratio is then never clipped), or the policy that sampled. `correction`, not this
ratio, handles the mismatch of trainer and rollout policy (staleness, precision): its weights multiply the
loss of each token, and tokens that it masks are left out of every term.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

from rlpipe.algo import verl_door
from rlpipe.algo.advantage import check_estimator
from rlpipe.algo.correction import Corrected, add_sample_size, correct, make_rule
from rlpipe.algo.user_functions import (
    POLICY_LOSS,
    accepted,
    check_grid,
    rehearsed,
    reload,
    user_function,
)
from rlpipe.config.algo import AlgoConfig, Correction, LossAgg, Proximal
from rlpipe.config.user_code import is_user_code
from rlpipe.metrics.values import Max, Mean, Sum, Value

if TYPE_CHECKING:
    import torch

    from rlpipe.algo.rule import CorrectionRule, TokenExtras

_MOMENT = "_moment/"


@dataclass(slots=True, kw_only=True)
class LossTotals:
    """Totals of the global batch of one optimizer step.

    tokens, sequences: numbers of trainable tokens and sequences. dp_size: number of data parallel ranks, a
    factor that cancels the mean over ranks.
    """

    tokens: float
    sequences: float
    dp_size: int

    def for_verl(self, config: AlgoConfig) -> dict[str, float | None]:
        """Return the totals under the names that verl's aggregation reads."""
        return {
            "dp_size": self.dp_size,
            "batch_num_tokens": self.tokens,
            "global_batch_size": self.sequences,
            "loss_scale_factor": config.loss_scale_factor,
        }


@dataclass(slots=True, kw_only=True)
class LossInputs:
    """Tokens of one micro-batch: tensors [B, S] float32, zero where mask is 0.

    logprobs, entropies: under the policy being updated, with the graph. old_logprobs: under the policy at the
    start of the batch. rollout_logprobs: under the policy that sampled. reference_logprobs: under the
    reference policy; None without a KL penalty. mask: 1 for tokens that are trained on.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference_logprobs: torch.Tensor | None


def micro_batch_loss(
    inputs: LossInputs,
    totals: LossTotals,
    config: AlgoConfig,
    *,
    rule: CorrectionRule | None = None,
    extras: TokenExtras | None = None,
) -> tuple[torch.Tensor, dict[str, Value]]:
    """Compute the loss of one micro-batch, a scalar, and its metrics.

    The sum of the gradients of all micro-batches is the gradient of the batch. rule, extras: as in `correct`.
    """
    logprobs, mask = inputs.logprobs, inputs.mask
    tokens = mask.sum().item()

    # Return a zero loss for an empty micro-batch, which this rank needs to stay in step with the others.
    if tokens == 0:
        return (logprobs * mask).sum(), {"perf/train_tokens": Sum(0)}

    current = logprobs.detach()
    trainer = current if config.proximal is Proximal.CURRENT else inputs.old_logprobs
    corrected = correct(
        current_logprobs=current,
        trainer_logprobs=trainer,
        rollout_logprobs=inputs.rollout_logprobs,
        mask=mask,
        config=config,
        rule=rule,
        extras=extras,
    )
    metrics = corrected.metrics | _probability_gap(trainer, inputs.rollout_logprobs, mask)
    metrics["perf/train_tokens"] = Sum(tokens)
    metrics["actor/entropy"] = Mean((inputs.entropies.detach() * mask).sum().item(), tokens)

    # verl averages its metrics over the accepted tokens, so there must be at least one.
    if not corrected.mask.any():
        return (logprobs * corrected.mask).sum(), metrics

    proximal = inputs.rollout_logprobs if config.proximal is Proximal.ROLLOUT else trainer
    loss, loss_metrics = _loss(inputs, corrected, proximal=proximal, totals=totals, config=config)
    return loss, metrics | loss_metrics


def _loss(
    inputs: LossInputs,
    corrected: Corrected,
    *,
    proximal: torch.Tensor,
    totals: LossTotals,
    config: AlgoConfig,
) -> tuple[torch.Tensor, dict[str, Value]]:
    """Compute policy loss, entropy bonus and KL penalty over the accepted tokens, and their metrics."""
    verl_totals = totals.for_verl(config)
    mask, mode = corrected.mask, config.loss_agg.value
    tokens = mask.sum().item()

    arguments = {
        "old_log_prob": proximal,
        "log_prob": inputs.logprobs,
        "advantages": inputs.advantages,
        "response_mask": mask,
        "loss_agg_mode": mode,
        "config": verl_door.actor_config(config, verl_totals),
        "rollout_is_weights": corrected.weights,
    }
    if is_user_code(config.policy_loss):
        loss, loss_metrics = _user_loss(config, arguments, verl_totals)
    else:
        loss, loss_metrics = verl_door.policy_loss(config.policy_loss)(**arguments)
    metrics: dict[str, Value] = {name: Mean(value * tokens, tokens) for name, value in loss_metrics.items()}
    metrics["actor/pg_loss"] = _share(loss, totals)

    if config.entropy_coef:
        entropy = verl_door.agg_loss(inputs.entropies, mask, mode, **verl_totals)
        loss = loss - config.entropy_coef * entropy

    if inputs.reference_logprobs is not None:
        kl = verl_door.kl_penalty(inputs.logprobs, inputs.reference_logprobs, config.kl_kind.value)
        kl_loss = verl_door.agg_loss(kl, mask, mode, **verl_totals)
        loss = loss + config.kl_coef * kl_loss
        metrics["actor/kl_loss"] = _share(kl_loss, totals)
    return loss, metrics


def _user_loss(
    config: AlgoConfig, arguments: dict[str, Any], totals: dict[str, float | None]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Call a user's loss; return the aggregated loss, and its metrics under `actor/user/`.

    Raises ValueError if the result is neither per-token losses nor an aggregated loss.
    """
    import torch

    name, weights = config.policy_loss, arguments["rollout_is_weights"]
    function = user_function(POLICY_LOSS, name)
    chosen = accepted(function, arguments)
    returned = function(**chosen)
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})

    # An aggregated loss is in verl's form: the user's function has already applied the correction's weights.
    if isinstance(loss, torch.Tensor) and not loss.shape:
        if weights is not None and "rollout_is_weights" not in chosen:
            raise ValueError(
                f"{POLICY_LOSS}={name!r} returns an aggregated loss and does not take rollout_is_weights, so "
                f"algo.correction={config.correction} would have no effect: return the losses of tokens, "
                "take it and multiply the losses by it, or set algo.correction=none."
            )
    else:
        losses = check_grid(POLICY_LOSS, name, loss, arguments["response_mask"])
        if weights is not None and "rollout_is_weights" not in chosen:
            losses = losses * weights
        loss = verl_door.agg_loss(losses, arguments["response_mask"], config.loss_agg.value, **totals)

    if not isinstance(metrics, dict):
        raise ValueError(
            f"{POLICY_LOSS}={name!r} returned metrics of type {type(metrics).__name__}, not dict."
        )
    return loss, {f"actor/user/{key.removeprefix('actor/')}": float(value) for key, value in metrics.items()}


def _rehearse(config: AlgoConfig) -> None:
    """Call a user's loss on four answers, and check its gradient and its normalisation. Raises ValueError."""
    import torch

    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1]])
    old = -torch.arange(1.0, 13).reshape(4, 3) / 8 * mask
    where = f"{POLICY_LOSS}={config.policy_loss!r}"
    losses = []

    # Compare the loss of the same tokens in a batch of only these, and in a batch of twice the size.
    for factor in (1, 2):
        logprobs = (old + 0.05 * mask).requires_grad_()
        totals = LossTotals(tokens=8.0 * factor, sequences=4.0 * factor, dp_size=1).for_verl(config)
        arguments = {
            "old_log_prob": old.clone(),
            "log_prob": logprobs,
            "advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]) * mask,
            "response_mask": mask.clone(),
            "loss_agg_mode": config.loss_agg.value,
            "config": verl_door.actor_config(config, totals),
            "rollout_is_weights": mask.clone() if config.correction is not Correction.NONE else None,
        }
        loss, _ = _user_loss(config, arguments, totals)
        losses.append(loss.item())

    if not torch.isfinite(loss):
        raise ValueError(f"{where} returned {loss.item()}: return a finite loss.")
    if not loss.requires_grad:
        raise ValueError(
            f"{where} returned a loss without a gradient: compute it from log_prob, not detached."
        )
    loss.backward()
    if logprobs.grad is None or not logprobs.grad.any():
        raise ValueError(f"{where} has the gradient 0 on log_prob: compute the loss from log_prob.")
    if not torch.isfinite(logprobs.grad).all():
        raise ValueError(f"{where} has a gradient that is not finite: check logarithms, roots and divisions.")
    if (logprobs.grad * (1 - mask)).any():
        raise ValueError(
            f"{where} has a gradient on tokens where response_mask is 0: multiply the losses by the mask."
        )

    if config.loss_agg is not LossAgg.TOKEN_SUM and abs(losses[0] - 2 * losses[1]) > 1e-4 * abs(losses[0]):
        raise ValueError(
            f"{where} does not divide by the totals of the batch, so that an answer would weigh more in a "
            "small micro-batch: return the losses of tokens [B, S], or aggregate them by verl's "
            "agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)."
        )


def distillation_loss(
    divergence: torch.Tensor, mask: torch.Tensor, *, totals: LossTotals, config: AlgoConfig
) -> tuple[torch.Tensor, Value]:
    """Aggregate token divergences [B, S] to a loss, in the same way as the policy loss (Jackpot Eq. 7: mean).

    Returns the loss and, for its metric, this micro-batch's share (see `_share`).
    """
    loss = verl_door.agg_loss(divergence, mask, config.loss_agg.value, **totals.for_verl(config))
    return loss, _share(loss, totals)


def optimizer_step_count(config: AlgoConfig) -> dict[str, Value]:
    """Return a count of one optimizer step for each metric that micro-batches report as shares (`_share`)."""
    names = ["actor/pg_loss"] + ["actor/kl_loss"] * bool(config.kl_coef)
    return {name: Mean(0.0, 1.0) for name in names}


def finish(metrics: dict[str, Value]) -> dict[str, Value]:
    """Complete the metrics that need sums over all micro-batches and ranks.

    These are the effective sample size, and the Pearson correlation of the probabilities that rollout and
    trainer assign to the sampled tokens.
    """
    moments = {name: metrics.pop(_MOMENT + name, None) for name in ("x", "y", "xx", "yy", "xy")}

    if moments["x"] is not None:
        x, y, xx, yy, xy = (m.value() for m in moments.values())
        # Rounding can make a variance slightly negative.
        spread = sqrt(max(xx - x * x, 0.0) * max(yy - y * y, 0.0))
        correlation = (xy - x * y) / spread if spread else 1.0
        metrics["training/rollout_actor_probs_pearson_corr"] = Mean(correlation, 1.0)
    return add_sample_size(metrics)


def _share(loss: torch.Tensor, totals: LossTotals) -> Mean:
    """Return a micro-batch's share of a loss metric, which sums over micro-batches and averages over steps.

    The count of a share is 0, because `optimizer_step_count` counts each step once.
    """
    return Mean(loss.item() / totals.dp_size, 0.0)


def _probability_gap(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, Value]:
    """Compare the probabilities of the sampled tokens under trainer and rollout.

    Includes their moments, from which `finish` computes a correlation.
    """
    sampled = mask.bool()
    x, y = rollout[sampled].double().exp(), trainer[sampled].double().exp()
    n, gap = len(x), (x - y).abs()

    sums = {"x": x.sum(), "y": y.sum(), "xx": x @ x, "yy": y @ y, "xy": x @ y}
    return {
        "training/rollout_probs_diff_mean": Mean(gap.sum().item(), n),
        "training/rollout_probs_diff_max": Max(gap.max().item()),
        **{_MOMENT + name: Mean(value.item(), n) for name, value in sums.items()},
    }


def check_names(config: AlgoConfig) -> None:
    """Refuse names of algorithms that are unknown or cannot be used, at launch.

    Raises ValueError with the registered names, or with the reason why a user's function cannot be used.
    """
    # A user's files may have changed since the last run of this process.
    reload()
    if is_user_code(config.policy_loss):
        rehearsed(POLICY_LOSS, config.policy_loss, lambda: _rehearse(config))
    else:
        verl_door.policy_loss(config.policy_loss)
    check_estimator(config)
    make_rule(config)
