"""The rollout workers of a run: which there are, who plays what, and what becomes of one that dies or leaves.

A worker that dies is replaced: the new one gets the newest weights before it serves, and what the dead one
was playing is played again, so no prompt is lost. One that does not answer within `cluster.hang_s` is killed,
which makes it a dead one. Workers may join and leave while the run goes on: one that joins has the newest
weights before anything is asked of it; one that leaves begins nothing and is given weights while it still
decodes; when its time is over its engine ends, and the others play the turns of its conversations until these
are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlpipe.config.run import ClusterConfig
from rlpipe.types import GenerateRequest, RunStopped

_CLOSE_S = 30.0  # in which an actor closes: its server alone is given ten
_JOIN_S = 1800.0  # in which one that joins has a place, an engine and the newest weights
_POLL_S = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """load: groups and evaluations it plays. leaving: begins no other, and is not replaced.

    away: has no engine any more, others play its turns. lost: of what it played when it left, or died while
    it was leaving.
    """

    number: int
    actor: Any
    load: int = 0
    leaving: bool = False
    away: bool = False
    lost: int = 0


class _Left(Exception):
    """The worker left the pool before it answered."""


class Workers:
    """newest: how a worker is given the newest weights. spawn: starts the actor of one, by its number.

    on_event: told of each that dies, hangs, joins, drains and leaves.
    """

    def __init__(
        self, config: ClusterConfig, spawn: Callable[[int], Any], on_event: Callable[..., None], count: int
    ) -> None:
        self._config, self._spawn, self._on_event = config, spawn, on_event
        self.members = [Worker(number=n, actor=spawn(n)) for n in range(count)]
        self.newest: tuple[str, Any] | None = None
        self._next, self._restarts = count, 0
        self._respawning = asyncio.Lock()
        self.updating = asyncio.Lock()  # held while weights are on their way, and while an engine ends

    @property
    def staying(self) -> list[Worker]:
        """Workers that begin what there is to play."""
        return [worker for worker in self.members if not worker.leaving]

    async def on_some(self, method: str, *args: Any) -> Any:
        """Call the least loaded worker; another one when it leaves meanwhile."""
        while True:
            worker = min(self.staying, key=lambda worker: worker.load)
            worker.load += 1
            try:
                return await self._call(worker, method, *args)
            except _Left:
                worker.lost += worker in self.members
            finally:
                worker.load -= 1

    async def on_all(
        self, method: str, *args: Any, serving: bool = False, return_exceptions: bool = False
    ) -> list[Any]:
        """What every worker answers, those that leave included and those that have left not.

        serving: only those that have an engine.
        """

        async def told(worker: Worker) -> list[Any]:
            try:
                return [await self._told(worker, method, *args)]
            except _Left:
                return []

        calls = (told(worker) for worker in self.members if not (serving and worker.away))
        found = await asyncio.gather(*calls, return_exceptions=return_exceptions)
        return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in found))

    async def join(self, count: int) -> list[int]:
        """Add workers; returns their numbers once all serve the newest weights.

        Where one does not come up the others join all the same. Raises RayError, TimeoutError.
        """
        first, self._next = self._next, self._next + count
        joining = (self._join(first + n) for n in range(count))
        found = await asyncio.gather(*joining, return_exceptions=True)
        if failed := next((one for one in found if isinstance(one, BaseException)), None):
            raise failed
        return list(found)

    async def _join(self, number: int) -> int:
        worker, given = Worker(number=number, actor=self._spawn(number)), None
        try:
            async with asyncio.timeout(_JOIN_S):
                await worker.actor.metrics.remote()  # its engine is up
                while self.newest is not None and self.newest is not given:
                    given = self.newest  # newer ones may come while it is given these
                    method, what = given
                    await getattr(worker.actor, method).remote(what)
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
        """Drain a worker: after `grace` seconds the others play the turns of what it has not ended.

        Returns how much they had to play again from its beginning: what it played when it died meanwhile, or
        where its turns cannot be handed over.
        Raises ValueError for a number that no worker has, and for the last worker.
        """
        worker = next((one for one in self.staying if one.number == number), None)
        if worker is None:
            numbers = ", ".join(str(one.number) for one in self.staying)
            raise ValueError(f"there is no rollout worker {number} that stays: name one of {numbers}.")
        if len(self.staying) == 1:
            raise ValueError(f"rollout worker {number} is the last one: add another before it is drained.")
        worker.leaving = True
        self._on_event("rollout_worker_draining", worker=number, playing=worker.load, grace=grace)
        deadline = asyncio.get_running_loop().time() + grace
        while worker.load and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)
        if worker.load and await self._hand_over(worker):
            relaying = asyncio.ensure_future(self._relay(worker))
            try:
                while worker.load:
                    await asyncio.sleep(_POLL_S)
            finally:
                relaying.cancel()
        worker.lost += worker.load
        self.members.remove(worker)
        try:
            if not worker.lost:
                await close(worker.actor, self._on_event)
        finally:
            ray.kill(worker.actor)
        fields = {"worker": number, "workers": len(self.staying), "played_again": worker.lost}
        self._on_event("rollout_worker_left", **fields)
        return worker.lost

    async def _hand_over(self, worker: Worker) -> bool:
        """End a worker's engine; whether its turns can be played by others."""
        async with self.updating:
            try:
                worker.away = await asyncio.wait_for(answer_of(worker.actor.hand_over.remote()), _CLOSE_S)
            except (RayError, TimeoutError) as error:
                self._on_event("close_failed", error=first_line(error))
        if worker.away:
            self._on_event("rollout_worker_handed_over", worker=worker.number, playing=worker.load)
        return worker.away

    async def _relay(self, worker: Worker) -> None:
        """Have the others play the turns of a worker without an engine, until cancelled or it dies."""

        async def relay(request: GenerateRequest) -> None:
            try:
                result = await self.on_some("generate", request)
            except (RayError, RunStopped) as error:
                await answer_of(worker.actor.turn_failed.remote(request.request_id, first_line(error)))
            else:
                await answer_of(worker.actor.turn_played.remote(request.request_id, result))

        with suppress(BaseExceptionGroup):  # it died: what it played is played again
            async with asyncio.TaskGroup() as turns:
                while True:
                    turns.create_task(relay(await answer_of(worker.actor.next_turn.remote())))

    async def _call(self, worker: Worker, method: str, *args: Any) -> Any:
        """Call one; when it dies, replace it and call again. Raises _Left."""
        while True:
            actor = worker.actor
            answer = getattr(actor, method).remote(*args)
            seconds = self._config.hang_s or None
            try:
                return await asyncio.wait_for(answer_of(answer), seconds)
            except RayTaskError:  # it answers; Ray's error is of its cause's class too, e.g. TimeoutError
                raise
            except TimeoutError:
                self._on_event("rollout_worker_hung", worker=worker.number, seconds=seconds)
                ray.kill(actor)  # the next call finds it dead
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            except RayActorError as error:
                await self._replace(worker, actor, error)

    async def _told(self, worker: Worker, method: str, *args: Any) -> Any:
        """Call one, and tell of the faults it knows of."""
        try:
            return await self._call(worker, method, *args)
        finally:
            for kind, fields in await self._call(worker, "take_events"):
                self._on_event(kind, worker=worker.number, **fields)

    async def _replace(self, worker: Worker, dead: Any, error: RayActorError) -> None:
        """Put a new actor in the dead one's place, once, with the newest weights."""
        async with self._respawning:
            while worker.actor is dead:
                if worker.leaving:  # what it played is played again by those that stay
                    raise _Left from error
                self._restarts += 1
                reason, most = first_line(error), self._config.max_restarts
                fields = {"worker": worker.number, "restarts": self._restarts, "error": reason}
                self._on_event("rollout_worker_died", **fields)
                if self._restarts > most:
                    raise RunStopped(
                        f"rollout workers died {self._restarts} times (cluster.max_restarts={most}); the "
                        f"last: {reason}. Run again, it continues from the newest checkpoint."
                    ) from error
                actor = self._spawn(worker.number)
                try:
                    if self.newest is not None:
                        method, what = self.newest
                        await getattr(actor, method).remote(what)
                except BaseException as again:
                    if isinstance(again, RayActorError) and not isinstance(again, RayTaskError):
                        error = again  # this one died while it was started
                        continue
                    ray.kill(actor)  # it refuses the weights, or the call that needed it was cancelled
                    raise
                if worker.leaving:
                    ray.kill(actor)
                else:
                    worker.actor = actor


async def close(actor: Any, on_event: Callable[..., None]) -> None:
    """Have an actor close what it holds; one that does not is told of, and left to `ray.kill`."""
    try:
        await asyncio.wait_for(answer_of(actor.close.remote()), _CLOSE_S)
    except (RayError, TimeoutError) as error:
        on_event("close_failed", error=first_line(error))


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return str(error).partition("\n")[0] or type(error).__name__  # a TimeoutError has no words


async def answer_of(answer: Any) -> Any:
    """An object reference as a coroutine."""
    return await answer
