"""What the loop asks of wherever its components run. Owns the contract only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Prompt, Trajectory


class TrainerLost(RuntimeError):
    """Some rank of the trainer died or hangs; none of its ranks is left."""


class Cluster(Protocol):
    """Where the components run; `actors/ray_cluster.py` and `actors/inline_cluster.py` implement it."""

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Play one prompt's group on some rollout worker."""

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Play held-out instances with the weights now served."""

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        """One optimizer step on all trainer ranks."""

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        """Target and draft of the trainer at every context of these."""

    async def freeze_draft(self) -> None:
        """No longer train the draft beside the policy."""

    async def publish_weights(self, version: int) -> dict[str, Value]:
        """Trainer weights, target and draft, to every engine; they serve `version` on return."""

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Copy trainer state; calling what is returned writes it, with an HF checkpoint, into the directory.

        Steps may be taken meanwhile, and change nothing of what is written.
        """

    async def load(self, directory: Path) -> None:
        """Trainer state from a checkpoint directory."""

    async def rebuild_trainer(self) -> None:
        """After `TrainerLost`: a trainer that has learnt nothing in the place of the lost one."""

    async def rollout_metrics(self) -> dict[str, Value]:
        """Engine counters since the last call."""

    async def close(self) -> None:
        """Stop every component."""
