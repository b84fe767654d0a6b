"""The contract of a correction of off-policy tokens: the data it needs, its weights, its state.

Each correction is one class in one file, such as `obrs` or a user's file. Worker, packing, passes and
checkpoint use only the contract, and do not depend on any particular correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlpipe.config.algo import AlgoConfig
from rlpipe.metrics.values import Value
from rlpipe.types import Trajectory


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenExtras:
    """The data that a rule declared, for the P tokens where the mask is 1, row by row, without gradients.

    columns: [P] float32 by name.
    rollout_top, target_top: [P, K] float32 logprobs of the same candidates under the rollout and the target
        policy; both are -inf for padding.
    """

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rollout_top: torch.Tensor | None = None
    target_top: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class CorrectionInputs:
    """One micro-batch. All tensors are [B, S] float32, detached, and 0 where mask is 0.

    trainer_logprobs: under the proximal policy. rollout_logprobs: under the policy that sampled.
    current_logprobs: under the policy being updated. mask: 1 for tokens that are trained on.
    threshold, low: `algo.correction_threshold` and `algo.correction_low`; a rule may ignore them.
    extras: further data that the rule declared.
    """

    trainer_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    current_logprobs: torch.Tensor
    mask: torch.Tensor
    threshold: float
    low: float
    extras: TokenExtras = field(default_factory=TokenExtras)

    @property
    def ratio(self) -> torch.Tensor:
        """pi_trainer / pi_rollout of each token, [B, S]; 1 where mask is 0."""
        return ((self.trainer_logprobs - self.rollout_logprobs) * self.mask).exp()


@dataclass(slots=True, kw_only=True)
class TokenWeights:
    """The result of a rule.

    weights: [B, S], factor of each token's loss; None: all ones.
    mask: [B, S], the accepted tokens, a subset of `inputs.mask`. The other tokens are left out of the loss,
        but still count in its normalisation.
    metrics: by name, logged as `rollout_corr/NAME`; a number is a mean over the accepted tokens.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float | Value] = field(default_factory=dict)


class CorrectionRule:
    """Base class of corrections; a subclass overrides `weigh` and the declarations it needs.

    target_at_start: whether the policy at the start of the batch scores the candidates, instead of the
        current policy.
    counts_masked: whether the metrics count rejected tokens together with those that `algo.mask` rejects.
    """

    target_at_start = False
    counts_masked = True

    def __init__(self, config: AlgoConfig) -> None:
        self.config = config

    def top_logprobs(self, vocab_size: int) -> int:
        """Return how many logprobs the engine must return with each sampled token."""
        return 0

    @property
    def needs_candidates(self) -> bool:
        """Whether the rule reads logprobs of candidate tokens."""
        return self.top_logprobs(1) > 0

    def columns(self, trajectory: Trajectory, seed: int) -> dict[str, np.ndarray]:
        """Compute further data per token: float32 arrays parallel to token_ids. seed: the run's seed."""
        return {}

    def weigh(self, inputs: CorrectionInputs) -> TokenWeights:
        """Compute weights and accepted tokens of a micro-batch.

        Args:
            inputs: tensors [B, S] of the micro-batch.

        Returns:
            Weights [B, S], or None for ones, and a mask [B, S], a subset of `inputs.mask`.

        Raises:
            ValueError: the rule cannot use the inputs.
        """
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, Value]) -> None:
        """Update the state from the metrics of a batch (full name -> value, reduced over all ranks)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the trainer's checkpoint saves; it is the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; it is empty if the checkpoint was written with another correction."""
