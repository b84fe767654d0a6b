"""The contract between the loop and the processes that its components run in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Prompt, Trajectory


class TrainerLost(RuntimeError):
    """A rank of the trainer died or hangs; all ranks have been ended."""


class Cluster(Protocol):
    """Rollout workers and a trainer, in this process or in others.

    Implemented by `actors/ray_cluster.py` and `actors/inline_cluster.py`, and wrapped by
    `actors/dumped_cluster.py`.
    """

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Roll out the group of one prompt on one of the rollout workers."""
        ...

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Roll out held-out instances with the weights that are currently served."""
        ...

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        """Take one optimizer step on all trainer ranks; return its metrics."""
        ...

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        """Compare the trainer's target and draft at every context of these trajectories."""
        ...

    async def freeze_draft(self) -> None:
        """Stop training the draft together with the policy."""
        ...

    async def publish_weights(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        """Copy the trainer's weights, target and draft; return a function that sends them to every engine.

        Training may continue meanwhile without changing the copy. The function returns metrics when all
        engines serve `version`. Only then may another version be published.
        """
        ...

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Copy the trainer's state; return a function that writes it, with an HF checkpoint, to `directory`.

        Training may continue meanwhile without changing the copy.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Load the trainer's state from a checkpoint directory."""
        ...

    async def rebuild_trainer(self) -> None:
        """Start a trainer to replace the lost one (`TrainerLost`); then load a checkpoint."""
        ...

    async def rollout_metrics(self) -> dict[str, Value]:
        """Return metrics from the engines' counters since the last call."""
        ...

    async def activity(self) -> list[str]:
        """Describe the current activity of each rollout worker, for a waiting user."""
        ...

    async def close(self) -> None:
        """Stop every component."""
        ...

    def kill(self) -> None:
        """End every process at once."""
        ...
