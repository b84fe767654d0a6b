"""The only module that imports verl; it does so on first use, because the import takes 4 to 8 seconds.

Owns the lookup of verl's functions by name, and building the `ActorConfig` that verl's losses read. A
contract test covers every symbol used here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlpipe.config.algo import AlgoConfig

if TYPE_CHECKING:
    import torch


@functools.cache
def core_algos() -> ModuleType:
    """Return verl's algorithm module with registries of advantages and losses, `agg_loss`, `kl_penalty`."""
    from verl.trainer.ppo import core_algos as module

    return module


def advantage_estimator(name: str) -> Callable[..., Any]:
    """Return a registered advantage estimator.

    Raises ValueError with the registered names if the name is unknown.
    """
    registry = core_algos().ADV_ESTIMATOR_REGISTRY
    _require("algo.advantage", name, registry)
    return registry[name]


def policy_loss(name: str) -> Callable[..., Any]:
    """Return a registered policy loss.

    Raises ValueError with the registered names if the name is unknown.
    """
    registry = core_algos().POLICY_LOSS_REGISTRY
    _require("algo.policy_loss", name, registry)
    return registry[name]


def kl_penalty(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate the per-token KL(policy || reference) (verl `kl_penalty`)."""
    return core_algos().kl_penalty(logprobs, reference, kind)


def agg_loss(losses: torch.Tensor, mask: torch.Tensor, mode: str, **totals: float | None) -> torch.Tensor:
    """Aggregate token losses to one number (verl `agg_loss`)."""
    return core_algos().agg_loss(losses, mask, mode, **totals)


def rollout_correction(**arguments: Any) -> tuple[Any, torch.Tensor, dict[str, float]]:
    """Call verl's `compute_rollout_correction_and_rejection_mask`: weights (a DataProto), mask, metrics."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(**arguments)


def actor_config(config: AlgoConfig, totals: dict[str, float | None]) -> Any:
    """Build verl's `ActorConfig` from settings. totals: normalise the loss over the global batch."""
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="megatron",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=config.clip_high,
        clip_ratio_low=config.clip_low,
        clip_ratio_high=config.clip_high,
        clip_ratio_c=config.clip_dual,
        loss_agg_mode=config.loss_agg.value,
        loss_scale_factor=config.loss_scale_factor,
        global_batch_info=totals,
    )


def _require(setting: str, name: str, registry: Mapping[str, object]) -> None:
    if name not in registry:
        raise ValueError(f"{setting}={name!r} is not registered with verl. Use one of {sorted(registry)}.")
