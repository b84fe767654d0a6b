"""Loads and calls a user's correction, and checks that it follows the contract of `rule`.

`algo.user_correction` names a function

    def correction(inputs: CorrectionInputs) -> TokenWeights

or, if it needs more than the logprobs of a micro-batch, a subclass of `CorrectionRule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlpipe.algo.rule import CorrectionInputs, CorrectionRule, TokenWeights
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.user_code import load_function
from rlpipe.metrics.values import Value
from rlpipe.types import Trajectory

SETTING = "algo.user_correction"


class UserCorrection(CorrectionRule):
    """The user's function or rule, with checked results. Raises ValueError if it cannot be imported."""

    def __init__(self, config: AlgoConfig) -> None:
        super().__init__(config)
        user = load_function(config.user_correction, setting=SETTING, takes="inputs")
        is_rule = isinstance(user, type) and issubclass(user, CorrectionRule)
        self._rule: CorrectionRule = user(config) if is_rule else _Function(config, user)
        self.target_at_start, self.counts_masked = self._rule.target_at_start, self._rule.counts_masked

    def top_logprobs(self, vocab_size: int) -> int:
        return self._rule.top_logprobs(vocab_size)

    def columns(self, trajectory: Trajectory, seed: int) -> dict[str, np.ndarray]:
        return self._rule.columns(trajectory, seed)

    def weigh(self, inputs: CorrectionInputs) -> TokenWeights:
        """Compute weights and accepted tokens, and check them.

        Raises ValueError when they break the contract: a wrong type or shape, a graph, a weight that is
        negative or not finite, or an accepted token that is not in inputs.mask.
        """
        result, mask = self._rule.weigh(inputs), inputs.mask

        if not isinstance(result, TokenWeights):
            raise self._broken(f"returned a {type(result).__name__}, not TokenWeights")
        if result.weights is not None:
            self._check_grid("weights", result.weights, mask)
        self._check_grid("mask", result.mask, mask)

        accepted = result.mask.to(mask.dtype)
        if (accepted * (1 - mask)).any() or not ((accepted == 0) | (accepted == 1)).all():
            raise self._broken("returned a mask that is not made of zeros and of ones where inputs.mask is 1")

        weights = None if result.weights is None else result.weights.to(mask.dtype)
        return TokenWeights(weights=weights, mask=accepted, metrics=result.metrics)

    def observe(self, metrics: Mapping[str, Value]) -> None:
        self._rule.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule.load_state_dict(state)

    def _check_grid(self, name: str, value: object, mask: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise self._broken(f"returned {name} of shape {shape}, not {tuple(mask.shape)}")
        if value.requires_grad:
            raise self._broken(f"returned {name} with a graph: detach them")
        if not torch.isfinite(value[mask.bool()].float()).all() or (value[mask.bool()] < 0).any():
            raise self._broken(f"returned {name} that are negative or not finite")

    def _broken(self, complaint: str) -> ValueError:
        return ValueError(f"{SETTING}={self.config.user_correction!r} {complaint}: see rlpipe.algo.rule.")


class _Function(CorrectionRule):
    """Wraps a function that computes weights from the logprobs of a micro-batch."""

    def __init__(self, config: AlgoConfig, function: Callable[[CorrectionInputs], TokenWeights]) -> None:
        super().__init__(config)
        self._function = function

    def weigh(self, inputs: CorrectionInputs) -> TokenWeights:
        return self._function(inputs)
