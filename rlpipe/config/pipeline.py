"""The loop's sizes: how many prompts make a step, how stale they may be. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least


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
        at_least(1, self, "pipeline", "prompts_per_step", "filter_limit")
        at_least(2, self, "pipeline", "group_size", remedy="group-normalised advantages compare siblings")
        at_least(0, self, "pipeline", "max_staleness", remedy="0 is synchronous")
        at_least(1, self, "pipeline", "oversample", remedy="1.5 is usual")
        if self.oversample > 1 and self.stale is not Stale.DROP:
            raise ValueError(
                f"pipeline.oversample={self.oversample} plays groups that are not trained on, and "
                f"pipeline.stale={self.stale} trains on all: set pipeline.stale=drop, or oversample=1."
            )

    @property
    def groups_ahead(self) -> int:
        """Groups that may be in the works for each step."""
        return math.ceil(self.prompts_per_step * self.oversample)
