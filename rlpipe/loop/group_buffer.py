"""Finished groups for the trainer, in admission order or in the order in which they finished.

Admission order is the default, because taking groups in the order in which they finish favours short, easy
prompts, and slow ones become stale. In admission order every admitted prompt is trained, and the staleness
bound is exact.

The training loop waits in `take_finished_groups`; `put` and `skip` wake it. Invariant: each index is taken or
skipped once. In admission order, the lowest indices that were not skipped are returned.
"""

from __future__ import annotations

import asyncio

from rlpipe.types import Group


class GroupBuffer:
    """Stores finished groups by index. first: the lowest index to be taken, in admission order."""

    def __init__(self, first: int = 0, *, in_order: bool = True) -> None:
        self._next = first
        self._in_order = in_order
        self._ready: dict[int, Group] = {}  # in the order in which they finished
        self._gone: set[int] = set()  # skipped, at or after _next
        self._changed = asyncio.Condition()

    async def put(self, index: int, group: Group) -> None:
        """Add the group with number `index`."""
        async with self._changed:
            known = index in self._ready or index in self._gone or (self._in_order and index < self._next)
            assert not known, f"group {index} was handed in twice"
            self._ready[index] = group
            self._changed.notify_all()

    async def skip(self, index: int) -> None:
        """Record that group `index` ended without training, so that nothing waits for it."""
        async with self._changed:
            self._ready.pop(index, None)
            if self._in_order and index >= self._next:
                self._gone.add(index)
            self._changed.notify_all()

    async def take_finished_groups(self, count: int) -> list[tuple[int, Group]]:
        """Wait until the next `count` groups are finished; return them with indices, or none if cancelled."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._wanted(count)) == count)

            # In admission order, later calls continue after the last index taken.
            taken = self._wanted(count)
            if self._in_order and taken:
                self._next = taken[-1] + 1
                self._gone = {index for index in self._gone if index >= self._next}
            return [(index, self._ready.pop(index)) for index in taken]

    def items(self) -> list[tuple[int, Group]]:
        """Return the finished groups and their indices, ascending."""
        return sorted(self._ready.items())

    def replace(self, index: int, group: Group) -> None:
        """Replace the finished group with this index by `group`."""
        assert index in self._ready, f"group {index} is not held"
        self._ready[index] = group

    @property
    def first(self) -> int:
        """The lowest index that is neither taken nor skipped."""
        return self._next

    def __len__(self) -> int:
        return len(self._ready)

    def _wanted(self, count: int) -> list[int]:
        """Return the indices of the next groups, ascending: fewer than `count` while some are missing."""
        if not self._in_order:
            return sorted(list(self._ready)[:count])

        # In admission order: omit skipped indices, and stop at the first one that is still in flight.
        indices, index = [], self._next
        while len(indices) < count and (index in self._ready or index in self._gone):
            if index in self._ready:
                indices.append(index)
            index += 1

        return indices
