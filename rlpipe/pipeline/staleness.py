"""The staleness gate: when the n-th group may start.

Groups are trained in admission order, `groups_per_step` to a step, so group n is trained by the step
that turns version n // groups_per_step into the next. Admitting it only once the trainer has reached
version n // groups_per_step - max_staleness bounds the staleness of every one of its tokens.

Waits: the controller's rolling task, in `admit`. Wakes: `advance`, after weights were published.
Invariant: max over trained tokens of (trainer version - token version) <= max_staleness.
"""

from __future__ import annotations

import asyncio


class StalenessGate:
    """Admission by version; max_staleness is in optimizer steps, 0 is synchronous."""

    def __init__(self, *, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.version = version
        self._advanced = asyncio.Condition()

    def is_open(self, index: int) -> bool:
        """Whether group `index` may start now.

        >>> gate = StalenessGate(max_staleness=1, groups_per_step=4)
        >>> gate.is_open(7), gate.is_open(8)
        (True, False)
        """
        return index // self.groups_per_step - self.max_staleness <= self.version

    async def admit(self, index: int) -> None:
        """Return once group `index` may start."""
        async with self._advanced:
            await self._advanced.wait_for(lambda: self.is_open(index))

    async def advance(self, version: int) -> None:
        """Tell that every engine now serves `version`."""
        async with self._advanced:
            self.version = version
            self._advanced.notify_all()
