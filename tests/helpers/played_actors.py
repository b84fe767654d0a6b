"""Handles of actors as Ray gives them, for objects of this process."""

from __future__ import annotations

import asyncio
import contextlib
import types
from typing import Any


class Ref:
    """Ray's reference of an answer: who stops waiting for it does not stop the call."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        task.add_done_callback(lambda done: done.exception())

    def __await__(self) -> Any:
        return asyncio.shield(self.task).__await__()


class Actor:
    """Ray's handle of an object; serial: one call at a time, but for what has a thread of its own."""

    def __init__(self, target: Any, serial: bool) -> None:
        self.target, self.lock = target, asyncio.Lock() if serial else None

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            async with self.lock if self.lock and name != "newest" else contextlib.nullcontext():
                return await getattr(self.target, name)(*args)

        method = types.SimpleNamespace(remote=lambda *args: Ref(asyncio.ensure_future(call(*args))))
        method.options = lambda **_: method
        return method
