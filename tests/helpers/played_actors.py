"""Handles of actors as Ray gives them, for objects of this process."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections import defaultdict
from typing import Any


class Ref:
    """Ray's reference of an answer: who stops waiting for it does not stop the call."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        task.add_done_callback(lambda done: done.exception())

    def __await__(self) -> Any:
        return asyncio.shield(self.task).__await__()


class Actor:
    """Ray's handle of an object; serial: one call at a time in each concurrency group."""

    def __init__(self, target: Any, serial: bool) -> None:
        self.target, self.serial = target, serial
        self.locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __getattr__(self, name: str) -> Any:
        return self._method(name, "main")

    def _method(self, name: str, group: str) -> Any:
        async def call(*args: Any) -> Any:
            async with self.locks[group] if self.serial else contextlib.nullcontext():
                return await getattr(self.target, name)(*args)

        return types.SimpleNamespace(
            remote=lambda *args: Ref(asyncio.ensure_future(call(*args))),
            options=lambda concurrency_group: self._method(name, concurrency_group),
        )
