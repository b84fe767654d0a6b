"""The loop's sizes: how many prompts make a step, how stale they may be. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlpipe.config.choice import Choice


class Stale(Choice):
    """What bounds staleness, and with it the order of training."""

    WAIT = "wait"  # a prompt starts only when it cannot become too stale; trained in order, nothing dropped
    DROP = "drop"  # first finished, first trained; what became too stale is given up (favours short ones)
    KEEP = "keep"  # first finished, first trained, whatever its age; needs an algo.correction


@dataclass(slots=True, kw_only=True)
class PipelineConfig:
    """prompts_per_step: groups of one training step. group_size: sibling trajectories of a group.

    max_staleness: how many training steps a trajectory's oldest token may lag behind the trainer;
        0 is synchronous. With stale=keep it bounds how far rollouts run ahead, not the age of a token.
    stale: see Stale.
    oversample: groups in the works for each one a step needs, with stale=drop: a step trains on the first
        to finish, and what is too stale when its version is published is stopped.
    filter_equal_rewards: give up groups whose rewards are all equal (they have no advantage) and play other
        prompts in their place. filter_limit: at most so many batches' worth of groups for one step; then
        equal groups are trained on as they are.
    """

    prompts_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 1
    stale: Stale = Stale.WAIT
    oversample: float = 1.0
    filter_equal_rewards: bool = False
    filter_limit: int = 4

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1:
            raise ValueError(f"pipeline.prompts_per_step must be at least 1, got {self.prompts_per_step}.")
        if self.group_size < 2:
            raise ValueError(
                f"pipeline.group_size must be at least 2, got {self.group_size}: "
                "group-normalised advantages compare siblings."
            )
        if self.max_staleness < 0:
            raise ValueError(f"pipeline.max_staleness must be >= 0, got {self.max_staleness}.")
        if self.oversample < 1:
            raise ValueError(f"pipeline.oversample must be at least 1, got {self.oversample}; 1.5 is usual.")
        if self.oversample > 1 and self.stale is not Stale.DROP:
            raise ValueError(
                f"pipeline.oversample={self.oversample} plays groups that are not trained on, and "
                f"pipeline.stale={self.stale} trains on all: set pipeline.stale=drop, or oversample=1."
            )
        if self.filter_limit < 1:
            raise ValueError(f"pipeline.filter_limit must be at least 1, got {self.filter_limit}.")

    @property
    def groups_ahead(self) -> int:
        """Groups that may be in the works for each step."""
        return math.ceil(self.prompts_per_step * self.oversample)
