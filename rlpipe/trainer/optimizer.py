"""Megatron's optimizer and schedule: one group for the policy, one for the draft, a guard for both.

Owns gradient clipping by group, the refusal of non-finite gradients, and the learning rate. Every piece
is Megatron's public one; `MegatronOptimizer.step` itself cannot be used, because it clips all groups by
one norm and applies whatever it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from rlpipe.config.mtp import MtpConfig
from rlpipe.config.trainer import Precision, TrainerConfig

POLICY, MTP = "policy", "mtp"


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """applied: False when a gradient was not finite. grad_norms: by group, before clipping. lrs: used."""

    applied: bool
    grad_norms: dict[str, float]
    lrs: dict[str, float]


class PolicyOptimizer:
    """AdamW over the trainable parameters of a wrapped model, float32 state, per-group clipping.

    steps: of the whole run, for the schedule. The k-th step (from 0) uses schedule(k + 1), so warm-up
    does not begin with a step of size 0 and the last step reaches min_lr.
    """

    def __init__(
        self, config: TrainerConfig, mtp: MtpConfig, model: DistributedDataParallel, steps: int
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
        # is_decoupled_lr: groups that differ in max_lr alone collide when a checkpoint is loaded
        overrides[ParamKey(name="*mtp.layers.*")] = ParamGroupOverride(
            max_lr=mtp.lr, min_lr=mtp.min_lr, clip_tag=MTP, is_decoupled_lr=True
        )
        self.inner = get_megatron_optimizer(
            optimizer_config, [model], config_overrides=overrides, use_gloo_process_groups=False
        )
        self.scheduler = OptimizerParamScheduler(
            self.inner,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(steps, config.warmup_steps + 1),
            lr_decay_style=config.lr_schedule.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        self.scheduler.step(1)
        for optimizer in self.inner.chained_optimizers:
            _create_state(optimizer)

    def zero_grad(self) -> None:
        """Forget gradients (those of the wrapped model's buffer are zeroed by its owner)."""
        self.inner.zero_grad()

    def step(self) -> StepOutcome:
        """Clip each group by its own norm and step, unless any gradient is not finite."""
        overflow = self.inner.prepare_grads()
        norms = {tag: self._norm(tag) for tag in self._tags()}
        lrs = {tag: max(g["lr"] for g in self._groups(tag)) for tag in norms}
        if overflow or not all(isfinite(norm) for norm in norms.values()):
            return StepOutcome(applied=False, grad_norms=norms, lrs=lrs)
        for tag, norm in norms.items():
            if self._clip[tag]:
                clip_grad_by_total_norm_fp32(self._parameters(tag), self._clip[tag], norm)
        self.inner.step_with_ready_grads()
        self.scheduler.step(1)
        return StepOutcome(applied=True, grad_norms=norms, lrs=lrs)

    def _norm(self, tag: str) -> float:
        """L2 norm over all ranks, each parameter counted once."""
        squares = 0.0
        for optimizer in self.inner.chained_optimizers:
            gradients = [
                p.grad
                for group in optimizer.param_groups
                if _tag(group) == tag
                for p in group["params"]
                if p.grad is not None and param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
            ]
            group = optimizer.get_grad_stats_parallel_group()
            squares += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
        return sqrt(squares)

    def _tags(self) -> list[str]:
        present = {_tag(group) for group in self.inner.param_groups}
        return [tag for tag in (POLICY, MTP) if tag in present]

    def _groups(self, tag: str) -> list[dict[str, Any]]:
        return [group for group in self.inner.param_groups if _tag(group) == tag]

    def _parameters(self, tag: str) -> list[torch.nn.Parameter]:
        return [p for group in self._groups(tag) for p in group["params"]]


def _tag(group: dict[str, Any]) -> str:
    return group.get("clip_tag", POLICY)


def _create_state(optimizer: MegatronOptimizer) -> None:
    """Make moments and step counts now, not in the first step: a checkpoint may be asked for before it."""
    if not isinstance(optimizer.optimizer, torch.optim.AdamW):
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        return
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
