"""The rollout workers of a run: assigns groups to them, replaces dead ones, adds and removes workers.

A worker that dies is replaced: the new one gets the newest weights before it serves, and the groups in flight
on the dead one are repeated, so no prompt is lost. A worker that does not answer within `cluster.hang_s` is
killed and replaced in the same way. Workers may join and leave during the run. A joining worker has the
newest weights before it gets any work. A leaving worker begins no new work and still receives weights while
it decodes. When its grace period is over, its engine ends and the other workers generate the remaining turns
of its conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlpipe.actors.handles import RolloutHandle, TrainerHandle
from rlpipe.config.run import ClusterConfig
from rlpipe.types import CONTINUES, GenerateRequest, RunStopped

T = TypeVar("T")
Call = Callable[[RolloutHandle], Awaitable[T]]  # starts a method of a worker's actor

_CLOSE_S = 30.0  # limit for closing an actor, including its engine
_JOIN_S = 1800.0  # limit for a joining worker to be placed, start its engine and load the newest weights
_POLL_S = 0.1
_ACTIVITY_S = 5.0  # limit for a worker to report its activity


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One member of the pool.

    load: number of groups and evaluations in flight on it. leaving: whether it begins no new work and is not
    replaced. relayed: whether its engine has ended and other workers generate its turns. lost: how many were
    in flight when it left, or died while leaving; other workers repeat them.
    """

    number: int
    actor: RolloutHandle
    load: int = 0
    leaving: bool = False
    relayed: bool = False
    lost: int = 0


class _Left(Exception):
    """The worker left the pool before it returned a result."""


class Workers:
    """The pool. spawn: starts a worker's actor, by its number. newest: loads the newest weights into it.

    on_event: called for each death, hang, join, drain and departure (kind, fields).
    """

    def __init__(
        self,
        config: ClusterConfig,
        spawn: Callable[[int], RolloutHandle],
        *,
        count: int,
        on_event: Callable[..., None],
    ) -> None:
        self._config, self._spawn, self._on_event = config, spawn, on_event
        self.members = [Worker(number=n, actor=spawn(n)) for n in range(count)]
        self.newest: Call[object] | None = None
        self._next, self._restarts = count, 0
        self._respawning = asyncio.Lock()
        self.updating = asyncio.Lock()  # held while weights are sent, and while an engine ends

    @property
    def staying(self) -> list[Worker]:
        """Workers that are not leaving, which begin new work."""
        return [worker for worker in self.members if not worker.leaving]

    async def call_least_loaded(self, call: Call[T]) -> T:
        """Call the least loaded worker; if it leaves before it returns, call another one."""
        while True:
            worker = min(self.staying, key=lambda worker: worker.load)
            worker.load += 1
            try:
                return await self._call(worker, call)
            except _Left:
                worker.lost += worker in self.members
            finally:
                worker.load -= 1

    async def call_all(self, call: Call[T], *, serving: bool = False) -> list[T]:
        """Call every worker, including leaving ones, and return the results. Raises the first failure.

        If a worker leaves before it returns, it has no result. serving: call only workers with a running
        engine.
        """
        return list(chain.from_iterable(await asyncio.gather(*self._calls(call, serving=serving))))

    async def settle_all(self, call: Call[T], *, serving: bool = False) -> list[T | BaseException]:
        """Call every worker like `call_all`, wait for all of them, and return failures among the results."""
        results = await asyncio.gather(*self._calls(call, serving=serving), return_exceptions=True)
        return list(chain.from_iterable([r] if isinstance(r, BaseException) else r for r in results))

    def _calls(self, call: Call[T], *, serving: bool) -> Iterator[Awaitable[list[T]]]:
        async def call_worker(worker: Worker) -> list[T]:
            try:
                return [await self._call_and_report(worker, call)]
            except _Left:
                return []

        return (call_worker(worker) for worker in self.members if not (serving and worker.relayed))

    async def activity(self) -> list[str]:
        """Return a text on the activity of each worker, even if a worker does not answer."""

        async def activity(worker: Worker) -> str:
            try:
                answer = wait_for_answer(worker.actor.activity.remote())
                return f"worker {worker.number}: {await asyncio.wait_for(answer, _ACTIVITY_S)}"
            except (RayError, TimeoutError) as error:
                return f"worker {worker.number} does not answer ({first_line(error)})"

        return list(await asyncio.gather(*map(activity, self.members)))

    async def join(self, count: int) -> list[int]:
        """Add workers; return their numbers once all serve the newest weights.

        If one does not start, the others still join. Raises RayError, TimeoutError.
        """
        first, self._next = self._next, self._next + count
        joining = (self._join(first + n) for n in range(count))
        results = await asyncio.gather(*joining, return_exceptions=True)

        numbers: list[int] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            numbers.append(result)
        return numbers

    async def _join(self, number: int) -> int:
        """Start a worker and load the newest weights into it; return its number. Raises TimeoutError."""
        worker, loaded = Worker(number=number, actor=self._spawn(number)), None
        try:
            async with asyncio.timeout(_JOIN_S):
                await worker.actor.metrics.remote()  # returns when its engine has started

                # Newer weights may be published while it loads these.
                while self.newest is not None and self.newest is not loaded:
                    loaded = self.newest
                    await loaded(worker.actor)
        except BaseException as error:
            ray.kill(worker.actor)
            if isinstance(error, TimeoutError) and not isinstance(error, RayError):
                raise TimeoutError(
                    f"rollout worker {number} does not serve the newest weights after {_JOIN_S:.0f} s: look "
                    "at the Ray cluster's free GPUs and at the worker's log."
                ) from error
            raise

        self.members.append(worker)
        self._on_event("rollout_worker_joined", worker=number, workers=len(self.staying))
        return number

    async def leave(self, number: int, grace: float) -> int:
        """Drain a worker: after `grace` seconds other workers generate the remaining turns of its groups.

        Returns the number of groups that other workers repeat from the beginning: the groups in flight if the
        worker dies meanwhile, or all remaining groups if its turns cannot be handed over.
        Raises ValueError if no worker has this number, and for the last worker.
        """
        worker = next((member for member in self.staying if member.number == number), None)
        if worker is None:
            numbers = ", ".join(str(member.number) for member in self.staying)
            raise ValueError(f"there is no rollout worker {number} that stays: name one of {numbers}.")
        if len(self.staying) == 1:
            raise ValueError(f"rollout worker {number} is the last one: add another before it is drained.")

        worker.leaving = True
        self._on_event("rollout_worker_draining", worker=number, in_flight=worker.load, grace=grace)
        deadline = asyncio.get_running_loop().time() + grace
        while worker.load and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)

        if worker.load and await self._hand_over(worker):
            relaying = asyncio.ensure_future(self._relay_turns(worker))
            try:
                while worker.load:
                    await asyncio.sleep(_POLL_S)
            finally:
                relaying.cancel()

        # An actor that still has work may hang or be dead: kill it without closing it.
        worker.lost += worker.load
        self.members.remove(worker)
        try:
            if not worker.lost:
                await close(worker.actor, self._on_event)
        finally:
            ray.kill(worker.actor)

        fields = {"worker": number, "workers": len(self.staying), "rerun": worker.lost}
        self._on_event("rollout_worker_left", **fields)
        return worker.lost

    async def _hand_over(self, worker: Worker) -> bool:
        """End a worker's engine; return whether other workers can generate its turns."""
        async with self.updating:
            try:
                worker.relayed = await asyncio.wait_for(
                    wait_for_answer(worker.actor.hand_over.remote()), _CLOSE_S
                )
            except (RayError, TimeoutError) as error:
                self._on_event("close_failed", error=first_line(error))

        if worker.relayed:
            self._on_event("rollout_worker_handed_over", worker=worker.number, in_flight=worker.load)
        return worker.relayed

    async def _relay_turns(self, worker: Worker) -> None:
        """Let others generate the turns of a worker without an engine, until cancelled or the worker dies."""

        async def relay(request: GenerateRequest) -> None:
            try:
                result = await self.call_least_loaded(lambda other: other.generate.remote(request))
            except (RayError, RunStopped) as error:
                await worker.actor.turn_failed.remote(request.request_id, first_line(error))
            else:
                await worker.actor.turn_generated.remote(request.request_id, result)

        with suppress(BaseExceptionGroup):  # the worker died, and others repeat its groups
            async with asyncio.TaskGroup() as turns:
                while True:
                    turns.create_task(relay(await worker.actor.next_turn.remote()))

    async def _call(self, worker: Worker, call: Call[T]) -> T:
        """Call one worker; when it dies, replace it and call again. Raises _Left."""
        while True:
            actor = worker.actor
            answer: Any = call(actor)
            timeout = self._config.hang_s or None
            try:
                return await asyncio.wait_for(wait_for_answer(answer), timeout)
            except RayTaskError as error:  # alive; the error also has its cause's class, e.g. TimeoutError
                if isinstance(error.cause, RunStopped):
                    raise error.cause from None  # the message is for the user, without Ray's traceback
                raise
            except TimeoutError:
                self._on_event("rollout_worker_hung", worker=worker.number, seconds=timeout)
                ray.kill(actor)  # the next call will fail, as the actor is dead
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            except RayActorError as error:
                await self._replace(worker, actor, error)

    async def _call_and_report(self, worker: Worker, call: Call[T]) -> T:
        """Call one worker, and report the failures that its engines recorded."""
        try:
            return await self._call(worker, call)
        finally:
            for kind, fields in await self._call(worker, lambda actor: actor.take_events.remote()):
                self._on_event(kind, worker=worker.number, **fields)

    async def _replace(self, worker: Worker, dead: RolloutHandle, error: RayActorError) -> None:
        """Replace a dead actor by one with the newest weights, only once for all failed calls."""
        async with self._respawning:
            while worker.actor is dead:
                if worker.leaving:  # the other workers repeat its groups
                    raise _Left from error

                self._restarts += 1
                reason, max_restarts = first_line(error), self._config.max_restarts
                fields = {"worker": worker.number, "restarts": self._restarts, "error": reason}
                self._on_event("rollout_worker_died", **fields)
                if self._restarts > max_restarts:
                    raise RunStopped(
                        f"rollout workers died {self._restarts} times (cluster.max_restarts={max_restarts}); "
                        f"the last: {reason}. Your environment's code runs in them: a crash in it (a library "
                        f"in C, too little memory) ends a worker. {CONTINUES}"
                    ) from error

                actor = self._spawn(worker.number)
                try:
                    if self.newest is not None:
                        await self.newest(actor)
                except BaseException as again:
                    if isinstance(again, RayActorError) and not isinstance(again, RayTaskError):
                        error = again  # the new actor died during its start
                        continue
                    ray.kill(actor)  # it refuses the weights, or this call was cancelled
                    raise

                if worker.leaving:
                    ray.kill(actor)
                else:
                    worker.actor = actor


async def close(actor: RolloutHandle | TrainerHandle, on_event: Callable[..., None]) -> None:
    """Close an actor; if it does not close, report it. The caller then ends it with `ray.kill`."""
    try:
        await asyncio.wait_for(wait_for_answer(actor.close.remote()), _CLOSE_S)
    except (RayError, TimeoutError) as error:
        on_event("close_failed", error=first_line(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has no message (TimeoutError)."""
    return str(error).partition("\n")[0] or type(error).__name__


async def wait_for_answer(answer: Awaitable[T]) -> T:
    """Wrap an object reference in a coroutine, for `asyncio`."""
    return await answer
