"""A correction that lives outside the package: called, and held to the contract of `correction.correct`.

    def correction(inputs: CorrectionInputs) -> OwnCorrection

weights: [B, S], what multiplies the loss of each token, or None for ones. mask: [B, S], the tokens kept, a
part of `inputs.mask`; the others leave the loss and still count where it is normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.own_code import load_function
from rlpipe.metrics.values import Mean, Value

SETTING = "algo.correction_function"


@dataclass(slots=True, kw_only=True, frozen=True)
class CorrectionInputs:
    """One micro-batch, everything [B, S] float32, detached, 0 where mask is 0.

    trainer_logprobs: of the proximal policy. rollout_logprobs: of the policy that sampled.
    current_logprobs: of the policy being updated. mask: 1 where a token is trained on.
    threshold, low: `algo.correction_threshold` and `algo.correction_low`, to use or not.
    """

    trainer_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    current_logprobs: torch.Tensor
    mask: torch.Tensor
    threshold: float
    low: float

    @property
    def ratio(self) -> torch.Tensor:
        """pi_trainer / pi_rollout of each token, [B, S]; 1 where mask is 0."""
        return ((self.trainer_logprobs - self.rollout_logprobs) * self.mask).exp()


@dataclass(slots=True, kw_only=True)
class OwnCorrection:
    """What a correction of one's own returns.

    metrics: means over the kept tokens by name; logged as `rollout_corr/NAME`.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def load_correction(config: AlgoConfig) -> Callable[[CorrectionInputs], OwnCorrection] | None:
    """The function that `algo.correction_function` names; None for another correction. Raises ValueError."""
    if config.correction is not Correction.CUSTOM:
        return None
    return load_function(config.correction_function, setting=SETTING, takes="inputs")


def own_correction(
    inputs: CorrectionInputs, config: AlgoConfig
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, Value]]:
    """Weights, kept tokens and metrics of the user's function, checked.

    Raises ValueError when it breaks the contract: another type or shape, a graph, a weight that is negative
    or not finite, a token kept that was not there.
    """
    function = load_correction(config)
    assert function is not None, "asked for without algo.correction=custom"
    found = function(inputs)
    if not isinstance(found, OwnCorrection):
        raise _broken(config, f"returned a {type(found).__name__}, not an OwnCorrection")
    grid = {"weights": found.weights, "mask": found.mask}
    for name, value in grid.items():
        if value is None and name == "weights":
            continue
        _check_grid(config, name, value, inputs.mask)
    kept = found.mask.to(inputs.mask.dtype)
    if (kept * (1 - inputs.mask)).any() or not ((kept == 0) | (kept == 1)).all():
        raise _broken(config, "returned a mask that is not made of zeros and of ones where inputs.mask is 1")
    count = kept.sum().item()
    metrics = {f"rollout_corr/{name}": Mean(float(x) * count, count) for name, x in found.metrics.items()}
    weights = None if found.weights is None else found.weights.to(inputs.mask.dtype)
    return weights, kept, metrics


def _check_grid(config: AlgoConfig, name: str, value: Any, mask: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise _broken(config, f"returned {name} of shape {shape}, not {tuple(mask.shape)}")
    if value.requires_grad:
        raise _broken(config, f"returned {name} with a graph: detach them")
    if not torch.isfinite(value[mask.bool()].float()).all() or (value[mask.bool()] < 0).any():
        raise _broken(config, f"returned {name} that are negative or not finite")


def _broken(config: AlgoConfig, what: str) -> ValueError:
    return ValueError(f"{SETTING}={config.correction_function!r} {what}: see rlpipe.algo.own_correction.")
