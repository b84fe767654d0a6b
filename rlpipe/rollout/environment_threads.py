"""The threads in which an environment's methods run, and the time limit of one call.

    call(step) -> wait for one of `count` slots -> a thread runs it -> result
                                                `-> not back in time: EnvironmentHung, another thread takes
                                                    the slot, and the stuck one ends when its call returns

A stuck thread cannot be ended by Python. It is counted for as long as it is stuck; too many of them end the
run. All threads are daemons, so the end of a process never waits for an environment.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count as counter
from types import FrameType
from typing import Any, TypeVar

from rlpipe.config.user_code import users_line
from rlpipe.envs.base import InfrastructureError
from rlpipe.types import RunStopped

T = TypeVar("T")
MAX_STUCK = 32  # threads of one rollout worker


class EnvironmentHung(InfrastructureError):
    """A call did not return within `env.step_timeout_s`. place: "file:line" of the user's code it is in."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.place)


class EnvironmentThreads:
    """Runs up to `count` calls at once, in the order in which they came.

    timeout_s: limit of a call, from the moment it has a thread (0: none).
    """

    def __init__(self, count: int, timeout_s: float = 0.0) -> None:
        self._slots = asyncio.Semaphore(count)
        self._timeout_s = timeout_s
        self._idle: list[_Thread] = []
        self._stuck: list[_Thread] = []
        self._numbers = counter()
        self._running: dict[asyncio.Task[Any], _Thread] = {}

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Return what the function returns, from one of the threads. name: of the method, for messages.

        A caller that is cancelled leaves; the call goes on and keeps its slot.
        Raises EnvironmentHung after the time limit, RunStopped when too many threads are stuck.
        """
        await self._slots.acquire()
        thread = self._idle.pop() if self._idle else _Thread(f"env_{next(self._numbers)}")
        returned = asyncio.wrap_future(thread.start(function, name))
        task = asyncio.ensure_future(self._watch(thread, returned))
        self._running[task] = thread
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def busiest(self) -> tuple[str, float] | None:
        """Return what the longest of the running calls is doing, and its seconds; None when none runs."""
        thread = min(self._running.values(), key=lambda thread: thread.since, default=None)
        if thread is None:
            return None
        return f"{thread.work}() at {thread.place()}", time.monotonic() - thread.since

    async def close(self, timeout_s: float) -> None:
        """Wait for running calls, at most so long, and end the threads that are idle then."""
        if self._running:
            await asyncio.wait(list(self._running), timeout=timeout_s)
        while self._idle:
            self._idle.pop().end()

    async def _watch(self, thread: _Thread, returned: asyncio.Future[T]) -> T:
        """Wait for a call, and replace its thread when it takes too long."""
        done, _ = await asyncio.wait({returned}, timeout=self._timeout_s or None)
        if done:
            self._idle.append(thread)
            return returned.result()

        place = thread.place()
        thread.end()
        self._stuck = [stuck for stuck in self._stuck if stuck.is_alive()] + [thread]
        message = (
            f"{thread.work}() did not return within env.step_timeout_s={self._timeout_s:g} s; it was at "
            f"{place}"
        )
        if len(self._stuck) > MAX_STUCK:
            raise RunStopped(
                f"{len(self._stuck)} threads of the environment are stuck, and Python cannot end them. The "
                f"last: {message}. Make that line return or raise; if it only is slow, increase "
                "env.step_timeout_s."
            )
        raise EnvironmentHung(message, place.partition(" `")[0])

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task)
        self._slots.release()

        # The caller may have left: a failure that nobody awaits is no news.
        if not task.cancelled():
            task.exception()


class _Thread:
    """A daemon thread that runs one function after another. work, since: the last one's name and start."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.work, self.since = "", 0.0

    def start(self, function: Callable[[], T], name: str) -> Future[T]:
        """Run the function next; return the future of its result."""
        self.work, self.since = name, time.monotonic()
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        """End once the function that runs has returned."""
        self._calls.put(None)

    def is_alive(self) -> bool:
        """Return whether the thread has not ended."""
        return self._thread.is_alive()

    def place(self) -> str:
        """Return "file:line" of the user's code that runs now, with the text of the line if it is known."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return users_line([*_frames(frame), *_awaited(frame)])

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            future.set_running_or_notify_cancel()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # Nothing of a call outlives it: a waiting thread would keep its episode in memory.
            del call, future, function


def _frames(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return a frame and its callers with their lines, the outermost first."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _awaited(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of what an event loop in this thread waits for: they are on no stack."""
    loops = (f.f_locals.get("self") for f, _ in _frames(frame) if f.f_code.co_name == "run_forever")
    loop = next((loop for loop in loops if isinstance(loop, asyncio.AbstractEventLoop)), None)
    frames = []
    for task in asyncio.all_tasks(loop) if loop else ():
        waiting: Any = task.get_coro()
        while (inner := getattr(waiting, "cr_frame", None)) is not None:
            frames.append((inner, inner.f_lineno))
            waiting = waiting.cr_await
    return frames
