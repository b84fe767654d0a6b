"""The event loop in which `async def` methods of environments run, in a separate thread.

A coroutine that never yields blocks only this loop, never the loop that serves the engine. Flow: a caller in
another loop awaits `result_of`; if that is cancelled, the coroutine is cancelled too. A caller in a thread
blocks in `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSING_S = 2.0  # time limit for cancelled coroutines to end


class UserLoop:
    """Runs awaitables that user code returns. thread: None until the first awaitable starts it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    async def result_of(self, awaitable: Awaitable[T]) -> T:
        """Await `awaitable` in this loop's thread; return its result. For callers in another event loop."""
        return await asyncio.wrap_future(self._submit(awaitable))

    def run(self, coro: Awaitable[T]) -> T:
        """Await `coro` in this loop's thread; return its result. For callers in a thread without a loop."""
        return self._submit(coro).result()

    def _submit(self, awaitable: Awaitable[T]) -> Future[T]:
        # Several threads may submit the first awaitable at the same time.
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=self._loop.run_forever, name="env-async", daemon=True)
                self.thread.start()
            return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._loop)

    async def close(self) -> None:
        """Cancel running coroutines and end the thread, unless a coroutine that never yields blocks it."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        ending = asyncio.run_coroutine_threadsafe(_cancel_others(), loop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(ending), _CLOSING_S)
        loop.call_soon_threadsafe(loop.stop)


def retrieve(ended: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a task whose caller may have been cancelled; otherwise asyncio prints it."""
    if not ended.cancelled():
        ended.exception()


async def _awaited(awaitable: Awaitable[T]) -> T:
    task = asyncio.current_task()
    assert task is not None, "a coroutine of a loop runs in a task"
    task.add_done_callback(retrieve)
    return await awaitable


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
