"""The threads in which an environment's methods run, and the time limit of each call.

    call(step) -> wait for one of `count` slots -> a thread runs it -> result
                                                `-> not back in time: EnvironmentHung, another thread takes
                                                    the slot, and the stuck one ends when its call returns
    result_of(coroutine) -> the loop for `async def` methods runs it -> result
                                     `-> not back in time: EnvironmentHung, and it is cancelled

Python cannot end a stuck thread. Stuck threads are counted, and if there are too many at once the run ends.
All threads are daemons, so the end of a process never waits for an environment. In these threads `os._exit`
is replaced and raises an exception, because an environment must not end a run silently.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from itertools import count as counter
from typing import Any, NoReturn, TypeVar

from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.running import line_of_coroutine, line_of_thread
from rlpipe.envs.user_loop import UserLoop, retrieve
from rlpipe.types import RunStopped

T = TypeVar("T")
_EXIT = os._exit
_IN_THREAD = threading.local()  # pid: id of this process while the thread runs an environment's call
MAX_STUCK = 32  # limit of stuck threads in one rollout worker


class EnvironmentHung(InfrastructureError):
    """A call did not return within `env.step_timeout_s`. place: "file:line" in user code where it hangs."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.place)


class EnvironmentThreads:
    """Runs up to `count` calls concurrently, in the order of their arrival.

    timeout_s: time limit of a call, counted from when it has a thread (0: none).
    """

    def __init__(self, count: int, timeout_s: float = 0.0) -> None:
        self._slots = asyncio.Semaphore(count)
        self._timeout_s = timeout_s
        self._idle: list[_Thread] = []
        self._stuck: list[_Thread] = []
        self._numbers = counter()
        self._running: dict[asyncio.Task[Any], _Thread | _Coroutine] = {}
        self._user_loop = UserLoop()
        os._exit = _exit_unless_in_thread

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Run the function in one of the threads and return its result. name: the method's, for messages.

        If the caller is cancelled, the call continues and keeps its slot.
        Raises EnvironmentHung after the time limit, RunStopped when too many threads are stuck.
        """
        await self._slots.acquire()
        thread = self._idle.pop() if self._idle else _Thread(f"env_{next(self._numbers)}")
        returned = asyncio.wrap_future(thread.start(function, name))
        task = asyncio.ensure_future(self._watch(thread, returned))
        self._running[task] = thread
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def result_of(self, coroutine: Coroutine[Any, Any, T], name: str) -> T:
        """Like `call`, but for a coroutine of the environment, which needs no thread."""
        task = asyncio.ensure_future(self._user_loop.result_of(coroutine))
        task.add_done_callback(retrieve)
        running = _Coroutine(coroutine, name, self._user_loop)
        self._running[task] = running
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s or None)
            if done:
                return task.result()
            raise self._hung(running)
        finally:
            del self._running[task]
            task.cancel()

    def busiest(self) -> tuple[str, float] | None:
        """Return name and seconds of the call that has run for longest; None when none is running."""
        longest = min(self._running.values(), key=lambda call: call.since, default=None)
        if longest is None:
            return None
        return f"{longest.work}() at {longest.place()}", time.monotonic() - longest.since

    async def close(self, timeout_s: float) -> None:
        """Wait for running calls up to a time limit, then end the idle threads."""
        if self._running:
            await asyncio.wait(list(self._running), timeout=timeout_s)
        while self._idle:
            self._idle.pop().end()
        await self._user_loop.close()

    async def _watch(self, thread: _Thread, returned: asyncio.Future[T]) -> T:
        """Wait for a call; after the time limit, replace its thread and raise EnvironmentHung."""
        done, _ = await asyncio.wait({returned}, timeout=self._timeout_s or None)
        if done:
            self._idle.append(thread)
            return returned.result()

        hung = self._hung(thread)
        thread.end()
        self._stuck = [stuck for stuck in self._stuck if stuck.is_alive()] + [thread]
        if len(self._stuck) > MAX_STUCK:
            raise RunStopped(
                f"{len(self._stuck)} threads of the environment are stuck, and Python cannot end them. The "
                f"last: {hung}. Make that line return or raise; if it only is slow, increase "
                "env.step_timeout_s."
            )
        raise hung

    def _hung(self, call: _Thread | _Coroutine) -> EnvironmentHung:
        place = call.place()
        limit = f"env.step_timeout_s={self._timeout_s:g} s"
        message = f"{call.work}() did not return within {limit}; it was at {place}"
        return EnvironmentHung(message, place.partition(" `")[0])

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task)
        self._slots.release()
        retrieve(task)


class _Thread:
    """A daemon thread that runs functions one at a time. work, since: name and start of the last one."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.work, self.since = "", 0.0

    def start(self, function: Callable[[], T], name: str) -> Future[T]:
        """Queue the function; return a future of its result."""
        self.work, self.since = name, time.monotonic()
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        """End the thread after the running function has returned."""
        self._calls.put(None)

    def is_alive(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread.is_alive()

    def place(self) -> str:
        """Return "file:line" of the user code that is running, with the text of the line if known."""
        return line_of_thread(self._thread)

    def _run(self) -> None:
        """Execute calls until None is queued; the body of a thread."""
        _IN_THREAD.pid = os.getpid()
        while (call := self._calls.get()) is not None:
            future, function = call
            future.set_running_or_notify_cancel()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # Drop all references to the call: a waiting thread would keep its episode in memory.
            del call, future, function


class _Coroutine:
    """A coroutine of the environment that is running in a loop. work, since: see `_Thread`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str, loop: UserLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self.work, self.since = name, time.monotonic()

    def place(self) -> str:
        """Return "file:line" of the user code where it waits, or of the code that blocks its loop."""
        return line_of_coroutine(self._coroutine, self._loop.thread)


def _exit_unless_in_thread(status: int) -> NoReturn:
    """Replace `os._exit`: raise in a thread of the environment, but not in a process forked from it."""
    if getattr(_IN_THREAD, "pid", None) == os.getpid():
        raise RuntimeError(f"os._exit({status}) would end the run: raise an exception instead")
    _EXIT(status)
