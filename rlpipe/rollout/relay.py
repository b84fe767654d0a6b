"""The engine of a worker that leaves: its turns are played by other workers' engines.

    collector --> generate --> next_turn --> (whoever asks) --> turn_played or turn_failed --> collector

Conversations and sandboxes stay where they are; what moves is one turn at a time. The part of a turn that the
engine before had decoded is not lost: the collector asks for the rest, and each token keeps its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlpipe.rollout.engine import Engine, EngineStats
from rlpipe.rollout.turn import nothing
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult


class RelayEngine:
    """Implements `Engine` in the place of `engine`, which the caller closes; used from one event loop.

    name: of this worker, so that its requests have ids of their own on other engines.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._asked: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self._waiting: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The turn as another engine plays it. Raises RuntimeError when none can."""
        moved = replace(request, request_id=f"{self._name}/{request.request_id}", session_id=None)
        played = asyncio.get_running_loop().create_future()
        self._waiting[moved.request_id] = request, played
        self._asked.put_nowait(moved)
        try:
            return replace(await played, request_id=request.request_id)
        finally:
            del self._waiting[moved.request_id]

    async def next_turn(self) -> GenerateRequest:
        """The next turn to play elsewhere, once there is one."""
        while (request := await self._asked.get()).request_id not in self._waiting:
            pass  # aborted meanwhile
        return request

    def turn_played(self, request_id: str, result: GenerateResult) -> None:
        """What came of a turn; of one that was aborted nothing is kept."""
        if future := self._open(request_id):
            future.set_result(result)

    def turn_failed(self, request_id: str, reason: str) -> None:
        """A turn that no engine could play."""
        if future := self._open(request_id):
            future.set_exception(RuntimeError(f"a turn handed to another worker failed: {reason}"))

    def _open(self, request_id: str) -> asyncio.Future[GenerateResult] | None:
        future = self._waiting.get(request_id, (None, None))[1]
        return future if future is not None and not future.done() else None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End turns with nothing, whoever plays them."""
        for moved, (request, _) in list(self._waiting.items()):
            if request_ids is None or request.request_id in request_ids:
                self.turn_played(moved, nothing(request, FinishReason.ABORT))

    def end_session(self, session_id: str) -> None:
        """Other engines keep nothing for these conversations."""

    def pause(self) -> None:
        """Others decode, and are paused by themselves."""

    def resume(self) -> None:
        """Nothing was stopped here."""

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Others are given new weights, and decode with them."""

    def stats(self) -> EngineStats:
        """Counters of the engine before."""
        return self._engine.stats()

    def close(self) -> None:
        """End what waits."""
        self.abort()
