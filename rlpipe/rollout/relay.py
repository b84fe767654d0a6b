"""The engine of a worker that is being removed: other workers' engines generate its turns.

    collector --> generate --> next_turn --> (another worker) --> turn_generated or turn_failed --> collector

Conversations and sandboxes stay with the worker; only turns are sent, one at a time. The tokens of a turn
that the previous engine has already decoded are not lost: the collector requests only the remaining ones, and
each token keeps its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlpipe.rollout.engine import Engine, EngineStats
from rlpipe.rollout.turn import empty_result
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult


class RelayEngine:
    """Replaces `engine`, which the caller closes. Used from one event loop.

    name: name of this worker, which makes its request ids unique on other engines.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._requests: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self._waiting: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the turn that another engine generates. Raises RuntimeError when no engine can."""
        # Workers may use equal request ids. The other engine has not cached the conversation: no session.
        moved = replace(request, request_id=f"{self._name}/{request.request_id}", session_id=None)
        generated = asyncio.get_running_loop().create_future()
        self._waiting[moved.request_id] = request, generated
        self._requests.put_nowait(moved)
        try:
            return replace(await generated, request_id=request.request_id)
        finally:
            del self._waiting[moved.request_id]

    async def next_turn(self) -> GenerateRequest:
        """Wait for a turn that another engine should generate, and return it."""
        # Skip turns that were aborted while they were queued.
        while (request := await self._requests.get()).request_id not in self._waiting:
            pass
        return request

    def turn_generated(self, request_id: str, result: GenerateResult) -> None:
        """Answer a turn; if it has been aborted, the result is discarded."""
        if future := self._open(request_id):
            future.set_result(result)

    def turn_failed(self, request_id: str, reason: str) -> None:
        """Fail a turn that no engine could generate."""
        if future := self._open(request_id):
            future.set_exception(RuntimeError(f"a turn handed to another worker failed: {reason}"))

    def _open(self, request_id: str) -> asyncio.Future[GenerateResult] | None:
        future = self._waiting.get(request_id, (None, None))[1]
        return future if future is not None and not future.done() else None

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End turns without a token, even if another engine is generating them."""
        for moved, (request, _) in list(self._waiting.items()):
            if request_ids is None or request.request_id in request_ids:
                self.turn_generated(moved, empty_result(request, FinishReason.ABORT))

    def end_session(self, session_id: str) -> None:
        """Do nothing, as other engines cache nothing for these conversations."""

    def pause(self) -> None:
        """Do nothing, as the other workers pause their engines."""

    def resume(self) -> None:
        """Do nothing, as the other workers resume their engines."""

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Do nothing, as the other workers update their engines."""

    def stats(self) -> EngineStats:
        """Return the counters of the previous engine."""
        return self._engine.stats()

    def close(self) -> None:
        """End all waiting turns."""
        self.abort()
