"""Finished groups, handed to the trainer in admission order.

Order is kept on purpose: taking whatever finished first favours short, easy prompts and lets slow
ones go stale; in order, every admitted prompt is trained, and the staleness bound is exact.

Waits: the training loop, in `take`. Wakes: `put`. Invariant: each index is taken once, in order.
"""

from __future__ import annotations

import asyncio

from rlpipe.types import Group


class GroupBuffer:
    """Holds groups that finished before their turn."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._ready: dict[int, Group] = {}
        self._changed = asyncio.Condition()

    async def put(self, index: int, group: Group) -> None:
        """Hand in group number `index`."""
        async with self._changed:
            assert index >= self._next and index not in self._ready, f"group {index} handed in twice"
            self._ready[index] = group
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups in order, once all of them are finished."""
        async with self._changed:
            wanted = range(self._next, self._next + count)
            await self._changed.wait_for(lambda: all(i in self._ready for i in wanted))
            self._next += count
            return [self._ready.pop(i) for i in wanted]

    def __len__(self) -> int:
        return len(self._ready)
