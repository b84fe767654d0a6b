"""The one module that imports verl, and does so on first use (the import takes 4 to 8 seconds).

Owns finding verl's functions by name and building the `ActorConfig` its losses read. A contract test
covers every symbol used here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlpipe.config.algo import AlgoConfig


@functools.cache
def core_algos() -> Any:
    """verl's algorithms: registries of advantages and losses, `agg_loss`, `kl_penalty`."""
    from verl.trainer.ppo import core_algos as module

    return module


def advantage_estimator(name: str) -> Callable[..., Any]:
    """A registered advantage estimator.

    Raises ValueError listing the names for one that is not registered.
    """
    registry = core_algos().ADV_ESTIMATOR_REGISTRY
    _require("algo.advantage", name, registry)
    return registry[name]


def policy_loss(name: str) -> Callable[..., Any]:
    """A registered policy loss.

    Raises ValueError listing the names for one that is not registered.
    """
    registry = core_algos().POLICY_LOSS_REGISTRY
    _require("algo.policy_loss", name, registry)
    return registry[name]


def kl_penalty(logprobs: Any, reference: Any, kind: str) -> Any:
    """Per-token estimate of KL(policy || reference) (verl `kl_penalty`)."""
    return core_algos().kl_penalty(logprobs, reference, kind)


def agg_loss(losses: Any, mask: Any, mode: str, **totals: Any) -> Any:
    """Token losses to one number (verl `agg_loss`)."""
    return core_algos().agg_loss(losses, mask, mode, **totals)


def rollout_correction(*args: Any, **kwargs: Any) -> Any:
    """verl `compute_rollout_correction_and_rejection_mask`."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    return compute_rollout_correction_and_rejection_mask(*args, **kwargs)


def actor_config(config: AlgoConfig, totals: dict[str, Any]) -> Any:
    """verl's `ActorConfig` with our settings; `totals` normalise the loss over the global batch."""
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


def _require(setting: str, name: str, registry: dict[str, Any]) -> None:
    if name not in registry:
        raise ValueError(f"{setting}={name!r} is not registered with verl. Use one of {sorted(registry)}.")
