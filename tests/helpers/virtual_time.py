"""An event loop whose clock is virtual: it jumps to the next timer when all that runs waits."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.loop.threads:  # one of them will wake us
            return super().select(None)
        if timeout is None:
            raise RuntimeError("all of it waits for ever")
        self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """now: seconds since the beginning. threads: those that run, for which the clock stands still.

    `asyncio.to_thread` calls its function at once; blocking code that waits for the loop runs by `thread`,
    and waits by `wait`. monotonic: the clock, as the module `time` has it.
    """

    def __init__(self) -> None:
        self.now, self.threads = 0.0, 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    monotonic = time

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns, on a thread of its own."""
        told: Future[Any] = Future()
        self.threads += 1

        def run() -> None:
            try:
                told.set_result(function(*args))
            except BaseException as error:
                told.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            return await asyncio.wrap_future(told, loop=self)
        finally:
            self.threads -= 1

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On such a thread: have the loop do some work, in which time passes."""

        async def counted() -> Any:
            self.threads -= 1
            try:
                return await work
            finally:
                self.threads += 1

        return asyncio.run_coroutine_threadsafe(counted(), self).result()
