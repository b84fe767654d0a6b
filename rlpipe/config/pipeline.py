"""Settings of the loop: prompts and groups per step, and their staleness. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least


class Stale(Choice):
    """The rule that limits staleness, and the resulting order of training."""

    WAIT = "wait"  # prompts start only if they cannot become too stale; training in order, without drops
    DROP = "drop"  # groups are trained on in the order in which they finish, and too stale groups are dropped
    KEEP = "keep"  # as drop, but groups of any age are trained on (needs an algo.correction)


@dataclass(slots=True, kw_only=True)
class PipelineConfig:
    """Settings of the groups of a training step, and of the maximum age of their tokens."""

    prompts_per_step: int = 8
    """Number of prompts in one training step; each prompt has one group."""

    group_size: int = 8
    """Number of trajectories in a group, all attempts at one prompt."""

    max_staleness: int = 1
    """Maximum number of training steps by which a trajectory's oldest token is older than the trainer; 0 is
    synchronous. With stale=keep it limits only how far rollouts run ahead, not the age of a token."""

    stale: Stale = Stale.WAIT
    """See `Stale`."""

    oversample: float = 1.0
    """With stale=drop: number of groups in flight for each group that a step needs. A step trains on the
    groups that finish first; groups that are too stale when a version is published are stopped."""

    filter_equal_rewards: bool = False
    """Drop groups whose rewards are all equal (they have no advantage) and roll out other prompts instead."""

    filter_limit: int = 4
    """Maximum number of batches of groups that the filter reads for one step; after that, groups with equal
    rewards are trained on."""

    def __post_init__(self) -> None:
        at_least(1, self, "pipeline", "prompts_per_step", "filter_limit")
        at_least(2, self, "pipeline", "group_size", remedy="group-normalised advantages compare siblings")
        at_least(0, self, "pipeline", "max_staleness", remedy="0 is synchronous")
        at_least(1, self, "pipeline", "oversample", remedy="1.5 is usual")

        if self.oversample > 1 and self.stale is not Stale.DROP:
            raise ValueError(
                f"pipeline.oversample={self.oversample} runs groups that are not trained on, and "
                f"pipeline.stale={self.stale} trains on all: set pipeline.stale=drop, or oversample=1."
            )

    @property
    def groups_ahead(self) -> int:
        """Maximum number of groups in flight for each step."""
        return math.ceil(self.prompts_per_step * self.oversample)
