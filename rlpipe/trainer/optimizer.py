"""Megatron's optimizer and schedules: one group for the policy, one for the draft model, a guard for both.

Owns gradient clipping by group, the refusal of non-finite gradients, learning rates, and the number of steps
of each group. It uses Megatron's public functions except `MegatronOptimizer.step`, which clips all groups by
one norm, steps all of them, and does not refuse any gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from rlpipe.config.draft import DraftConfig
from rlpipe.config.trainer import Precision, TrainerConfig
from rlpipe.metrics.values import Last, Mean, Sum, Value

POLICY, MTP = "policy", "mtp"


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Outcome of a step. applied: stepped groups. grad_norms (before clipping) and lrs are by group."""

    applied: set[str]
    grad_norms: dict[str, float]
    lrs: dict[str, float]

    @property
    def idle(self) -> set[str]:
        """Groups whose gradient was 0."""
        return {tag for tag, norm in self.grad_norms.items() if norm == 0}

    def metrics(self, groups: Sequence[str]) -> dict[str, Value]:
        """Report the outcome of these groups: stepped, idle or skipped."""
        metrics: dict[str, Value] = {}
        for tag in groups:
            name, done = {POLICY: "actor", MTP: "mtp"}[tag], tag in self.applied

            # A policy whose gradient is 0 is idle; other groups that were not stepped are skipped.
            rests = tag == POLICY and tag in self.idle
            metrics[f"{name}/skipped_steps"] = Sum(not done and not rests)
            if tag == POLICY:
                metrics["actor/idle_steps"] = Sum(rests)

            if tag in self.lrs:
                metrics[f"{name}/lr"] = Last(self.lrs[tag])
            if done:
                metrics[f"{name}/grad_norm"] = Mean(self.grad_norms[tag], 1)
        return metrics


@dataclass(slots=True)
class _Groups:
    """Looks up an optimizer's groups of one tag at each use, as loading a checkpoint replaces them."""

    inner: MegatronOptimizer
    tag: str

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the tag, in the optimizer's order."""
        return [group for group in self.inner.param_groups if _tag(group) == self.tag]


class PolicyOptimizer:
    """AdamW over the trainable parameters of a wrapped model, with float32 state and clipping by group.

    steps: optimizer steps of the full run, for the schedules. updates: steps of each group so far. Step k
    (from 0) uses schedule(k + 1), so warm-up does not begin with a step of size 0 and the last step reaches
    min_lr.
    """

    def __init__(
        self, config: TrainerConfig, mtp: DraftConfig, model: DistributedDataParallel, *, steps: int
    ) -> None:
        self._clip = {POLICY: config.clip_grad, MTP: mtp.clip_grad}
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=0.0,
            bf16=config.precision is Precision.BF16,
            params_dtype=torch.bfloat16 if config.precision is Precision.BF16 else torch.float32,
            use_distributed_optimizer=config.distributed_optimizer,
        )

        overrides = get_standard_config_overrides(optimizer_config)
        # is_decoupled_lr: without it, groups that differ only in max_lr collide when a checkpoint is loaded.
        # Megatron's type lacks both keys, but its groups accept any key.
        overrides[ParamKey(name="*mtp.layers.*")] = ParamGroupOverride(  # pyright: ignore[reportCallIssue]
            max_lr=mtp.lr, min_lr=mtp.min_lr, clip_tag=MTP, is_decoupled_lr=True
        )
        inner = get_megatron_optimizer(
            optimizer_config, [model], config_overrides=overrides, use_gloo_process_groups=False
        )
        self.inner = cast("ChainedOptimizer", inner)

        # One schedule for each group that has parameters on this rank.
        present = {_tag(group) for group in self.inner.param_groups}
        plans = {POLICY: (config, steps), MTP: (mtp, max(1, steps // mtp.interval))}
        self._schedules = {
            tag: _schedule(plan, _Groups(self.inner, tag), steps=length, weight_decay=config.weight_decay)
            for tag, (plan, length) in plans.items()
            if tag in present
        }

        for optimizer in self.inner.chained_optimizers:
            _create_state(optimizer)
        self.updates: dict[str, int] = {}
        self.set_updates({})

    def zero_grad(self) -> None:
        """Reset gradients, except in the wrapped model's buffer, which its owner must zero."""
        self.inner.zero_grad()

    def step(self, scales: Mapping[str, float]) -> StepOutcome:
        """Scale each group's gradient, clip it by the group's norm and step.

        scales: factor by group. A group is not stepped (weights, moments and learning rate do not change) if
        it is not in `scales`, if its gradient is 0 everywhere, or if it is the draft model and its gradient
        is not finite. If the policy's gradient is not finite, no group is stepped.
        """
        overflow = self.inner.prepare_grads()
        due = [tag for tag in self._schedules if scales.get(tag)]
        for tag in due:
            if scales[tag] != 1:
                for gradient in (p.grad for p in self._parameters(tag) if p.grad is not None):
                    gradient.mul_(scales[tag])

        norms = {tag: self._norm(tag) for tag in due}
        lrs = {tag: max(g["lr"] for g in _Groups(self.inner, tag).param_groups) for tag in due}
        finite = {tag for tag in due if isfinite(norms[tag]) and not overflow}

        # With a gradient of 0, AdamW would still move weights by their momentum and decay.
        applied = {tag for tag in finite if norms[tag]}
        if not applied or (POLICY in due and POLICY not in finite):
            return StepOutcome(applied=set(), grad_norms=norms, lrs=lrs)

        for tag in applied:
            if self._clip[tag]:
                parameters = cast("list[torch.Tensor]", self._parameters(tag))
                clip_grad_by_total_norm_fp32(parameters, self._clip[tag], norms[tag])

        # AdamW skips parameters without a gradient: not even momentum changes them.
        left_out = self._schedules.keys() - applied
        for parameter in (p for tag in left_out for p in self._parameters(tag)):
            parameter.grad = None

        self.inner.step_with_ready_grads()
        for tag in applied:
            self.updates[tag] += 1
            self._schedules[tag].step(1)

        # Fused optimizers have also counted a step for the groups that were left out: restore their counts.
        if left_out:
            self.write_steps(self.updates)
        return StepOutcome(applied=applied, grad_norms=norms, lrs=lrs)

    def set_updates(self, updates: Mapping[str, int]) -> None:
        """Set the number of steps of each group (0 if not named), to continue from there."""
        self.updates = {tag: updates.get(tag, 0) for tag in self._schedules}

        # The schedule is one step ahead: it gives the learning rate of the next update.
        for tag, schedule in self._schedules.items():
            schedule.num_steps = 0
            schedule.step(self.updates[tag] + 1)
        self.write_steps(self.updates)

    def write_steps(self, steps: Mapping[str, int]) -> None:
        """Set AdamW's step count of every parameter, each in a separate tensor.

        torch stores the count by parameter; fused optimizers store it by group, and advance it even without a
        gradient.
        """
        for optimizer in self.inner.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                count = steps[_tag(group)]
                if "step" in group:
                    group["step"] = count
                if isinstance(optimizer.optimizer, torch.optim.AdamW):
                    for parameter in group["params"]:
                        optimizer.optimizer.state[parameter]["step"] = torch.tensor(float(count))

    def _norm(self, tag: str) -> float:
        """Compute the L2 norm over all ranks, with each parameter counted once."""
        squares = 0.0
        for optimizer in self.inner.chained_optimizers:
            gradients = [
                p.grad
                for group in optimizer.param_groups
                if _tag(group) == tag
                for p in group["params"]
                if p.grad is not None and param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
            ]

            # Experts have a separate optimizer with other ranks: each optimizer reduces over its own group.
            group = optimizer.get_grad_stats_parallel_group()
            squares += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
        return sqrt(squares)

    def _parameters(self, tag: str) -> list[torch.nn.Parameter]:
        """List the parameters in the optimizer's groups of a tag."""
        return [p for group in _Groups(self.inner, tag).param_groups for p in group["params"]]


def _tag(group: dict[str, Any]) -> str:
    """Return the tag of a parameter group; default: the policy's."""
    return group.get("clip_tag", POLICY)


def _schedule(
    plan: TrainerConfig | DraftConfig, groups: _Groups, *, steps: int, weight_decay: float
) -> OptimizerParamScheduler:
    """Make a schedule of one group: warm-up, then the plan's shape until `steps`."""
    # Megatron requires the decay to end after the warm-up, even if the run ends before that.
    return OptimizerParamScheduler(
        groups,  # pyright: ignore[reportArgumentType]  # the scheduler reads and sets only param_groups
        init_lr=0.0,
        max_lr=plan.lr,
        min_lr=plan.min_lr,
        lr_warmup_steps=plan.warmup_steps,
        lr_decay_steps=max(steps, plan.warmup_steps + 1),
        lr_decay_style=plan.lr_schedule.value,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _create_state(optimizer: MegatronOptimizer) -> None:
    """Create moments and step counts before the first step, because a checkpoint may be saved earlier."""
    if not isinstance(optimizer.optimizer, torch.optim.AdamW):
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        return

    for group in optimizer.optimizer.param_groups:
        # On a CPU, torch's fused kernel takes a third of the time of its separate operations.
        group["fused"] = all(parameter.device.type == "cpu" for parameter in group["params"])
        for parameter in group["params"]:
            optimizer.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
