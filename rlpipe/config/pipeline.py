"""The loop's sizes: how many prompts make a step, how stale they may be. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PipelineConfig:
    """prompts_per_step: groups of one training step. group_size: sibling trajectories of a group.

    max_staleness: how many training steps a trajectory's oldest token may lag behind the trainer;
        0 is synchronous.
    """

    prompts_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 1

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
