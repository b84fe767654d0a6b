"""The staleness gate decides when the n-th group may start, and which part of a group may be trained.

Let `works` be the number of groups that were admitted and have not ended, and S = max_staleness. The gate is
open while works < (S + 1) * groups_per_step. When groups are trained in admission order, `groups_per_step` in
each step, at most S steps pass between the admission of a group and the step that trains it, even if other
groups are dropped. This bounds the staleness of each of its tokens (pipeline.stale=wait).

The controller's rollout task waits in `wait_for_slot`. `set_version`, called after weights were published,
and `release_slot` wake it.
Invariant (in admission order): max over trained tokens of (trainer version - token version) <= max_staleness.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rlpipe.types import Group, Trajectory, TrajectoryStatus


class StalenessGate:
    """Admits groups by version. max_staleness: in optimizer steps; 0 is synchronous.

    groups_per_step: number of groups that a step trains. ahead: number of groups admitted for each step, some
    of which may end untrained (default: groups_per_step). skipped: groups that ended without being trained.
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
        """Wait until group `index` may start."""
        async with self._advanced:
            await self._advanced.wait_for(lambda: self.is_open(index))

    async def set_version(self, version: int) -> None:
        """Record that every engine now serves `version`."""
        async with self._advanced:
            self.version = version
            self._advanced.notify_all()

    async def release_slot(self) -> None:
        """Record that a group ended untrained, so that another one may be admitted."""
        async with self._advanced:
            self._skipped += 1
            self._advanced.notify_all()


def too_stale(trajectory: Trajectory, version: int, max_staleness: int) -> bool:
    """Return whether any token was sampled more than max_staleness versions before `version`."""
    oldest = trajectory.oldest_version
    return oldest is not None and version - oldest > max_staleness


def fresh_part(group: Group, version: int, max_staleness: int) -> tuple[Group | None, list[Trajectory]]:
    """Return the part of a group that can be trained at `version`, and the complete trajectories too stale.

    The part is None if fewer than two complete trajectories remain, because they would have no advantage;
    then all complete trajectories are returned as too stale. Masked trajectories stay in the group.
    """
    complete = [t for t in group.trajectories if t.status is TrajectoryStatus.COMPLETE]
    stale = [t for t in complete if too_stale(t, version, max_staleness)]
    if not stale:
        return group, []
    if len(complete) - len(stale) < 2:
        return None, complete

    lost = {t.trajectory_id for t in stale}
    return replace(group, trajectories=[t for t in group.trajectories if t.trajectory_id not in lost]), stale
