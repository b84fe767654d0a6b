"""The staleness gate: when the n-th group may start; and which part of a group may still be trained.

Let `works` be the number of groups that were admitted and have not ended, and S = max_staleness. The gate is
open while works < (S + 1) * groups_per_step. When groups are trained in admission order, `groups_per_step` to
a step, at most S steps pass between the admission of a group and the step that trains it, even if others are
dropped. This bounds the staleness of every one of its tokens (pipeline.stale=wait).

Waits: the controller's rolling task, in `wait_for_slot`. Wakes: `set_version`, after weights were
published, and `release_slot`.
Invariant (in admission order): max over trained tokens of (trainer version - token version) <= max_staleness.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rlpipe.types import Group, Trajectory, TrajectoryStatus


class StalenessGate:
    """Admission by version; max_staleness is in optimizer steps, 0 is synchronous.

    groups_per_step: groups that a step trains. ahead: groups admitted for each step, some of which may end
    untrained (default: as many as are trained). skipped: groups that ended without being trained.
    limit: total number of groups that may be admitted, not counting the skipped ones.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        version: int = 0,
        ahead: int | None = None,
        skipped: int = 0,
        limit: int | None = None,
    ) -> None:
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.version = version
        self._capacity = (max_staleness + 1) * (ahead or groups_per_step)
        self._skipped = skipped
        self._limit = limit
        self._advanced = asyncio.Condition()

    def is_open(self, index: int) -> bool:
        """Return whether group `index` may start now.

        >>> gate = StalenessGate(max_staleness=1, groups_per_step=4)
        >>> gate.is_open(7), gate.is_open(8)
        (True, False)
        """
        # Skipped groups free their slots.
        counted = index - self._skipped
        within = self._limit is None or counted < self._limit
        return within and counted - self.version * self.groups_per_step < self._capacity

    async def wait_for_slot(self, index: int) -> None:
        """Return once group `index` may start."""
        async with self._advanced:
            await self._advanced.wait_for(lambda: self.is_open(index))

    async def set_version(self, version: int) -> None:
        """Record that every engine now serves `version`."""
        async with self._advanced:
            self.version = version
            self._advanced.notify_all()

    async def release_slot(self) -> None:
        """Record that a group ended untrained: another one may be admitted instead."""
        async with self._advanced:
            self._skipped += 1
            self._advanced.notify_all()


def too_stale(trajectory: Trajectory, version: int, max_staleness: int) -> bool:
    """Return whether any token was sampled more than max_staleness versions before `version`."""
    oldest = trajectory.oldest_version
    return oldest is not None and version - oldest > max_staleness


def fresh_part(group: Group, version: int, max_staleness: int) -> tuple[Group | None, list[Trajectory]]:
    """Return the part of a group trainable at `version`, and the complete trajectories that are too stale.

    The part is None when fewer than two complete trajectories remain, as these have no advantage; then all
    complete trajectories are returned as lost. Masked trajectories stay in the group.
    """
    complete = [t for t in group.trajectories if t.status is TrajectoryStatus.COMPLETE]
    stale = [t for t in complete if too_stale(t, version, max_staleness)]
    if not stale:
        return group, []
    if len(complete) - len(stale) < 2:
        return None, complete

    lost = {t.trajectory_id for t in stale}
    return replace(group, trajectories=[t for t in group.trajectories if t.trajectory_id not in lost]), stale
