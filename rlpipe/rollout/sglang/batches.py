"""Sends several turns to the server in one request, for callers that need only complete answers.

Requests that are made in the same round of the event loop are sent in one POST: the siblings of a group, or
turns whose environments answered at the same time. Only the last part of an answer is parsed, as it contains
the others.

| event                                 | this request     | other requests of its POST        |
| its caller is cancelled               | aborted by its id | continue                         |
| the server refuses the POST           | sent separately  | sent separately                   |
| the connection breaks                 | ServerUnreachable | ServerUnreachable                |
| silent for the client's timeout       | ServerUnreachable | continue                         |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.weights.protocols import ServerError, ServerUnreachable

_ID = re.compile(rb'"id":\s*"([0-9a-f]+)"')
_GROWING = re.compile(rb'"finish_reason":\s*null')
_COLUMNS = ("rid", "input_ids", "sampling_params")  # lists by request in a joint POST


@dataclass(slots=True, eq=False)
class _Turn:
    """One request. heard: when its last part arrived."""

    body: Mapping[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    heard: float = field(default_factory=time.monotonic)


class Batches:
    """Joins requests to one server. Used from one event loop.

    events: sends a POST and yields its answer part by part. abort: ends a request by its id. timeout: seconds
        that a request may be silent.
    """

    def __init__(
        self,
        events: Callable[[bytes], AsyncIterator[bytes]],
        abort: Callable[[str], Coroutine[Any, Any, Any]],
        timeout: float,
    ) -> None:
        self._events, self._abort, self._timeout = events, abort, timeout
        self._turns: set[_Turn] = set()  # turns without a complete answer
        self._waiting: list[_Turn] = []  # turns that are not sent yet
        self._running: set[asyncio.Task[None]] = set()

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last part of the answer to `/generate`. Raises ServerError, ServerUnreachable."""
        turn = _Turn(body, asyncio.get_running_loop().create_future())
        if not self._waiting:
            self._start(self._send_waiting())
        self._waiting.append(turn)
        self._turns.add(turn)

        try:
            return await turn.answer
        except asyncio.CancelledError:
            # A request that was already sent must also be ended on the server.
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._start(self._abandoned(body["rid"]))
            raise
        finally:
            self._turns.discard(turn)

    def close(self) -> None:
        """End running requests; their callers get ServerUnreachable."""
        _fail(self._turns, ServerUnreachable("/generate was closed: its server was replaced"))
        for task in self._running:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _send_waiting(self) -> None:
        """Send all waiting requests, with one POST for requests of the same kind."""
        # Wait for requests that other tasks make in this round of the loop.
        await asyncio.sleep(0)
        turns, self._waiting = self._waiting, []
        kinds: dict[tuple[Any, ...], list[_Turn]] = {}
        for turn in turns:
            shared = ("priority", "top_logprobs_num", "return_routed_experts", "routed_experts_start_len")
            kinds.setdefault(tuple(map(turn.body.get, shared)), []).append(turn)
        for alike in kinds.values():
            self._start(self._post(alike))

    async def _post(self, turns: Sequence[_Turn]) -> None:
        """Post requests of one kind, and answer each."""
        open_ = {turn.body["rid"]: turn for turn in turns}
        failure: Exception = ServerUnreachable("/generate ended without an answer")
        watching = asyncio.ensure_future(self._watch(open_))

        try:
            async for part in self._events(json.dumps(joined_body([turn.body for turn in turns])).encode()):
                name = _ID.search(part) if len(turns) > 1 else None
                rid = turns[0].body["rid"] if name is None else name[1].decode()
                if b'"error"' in part[:20]:
                    raise ServerError(f"/generate: {json.loads(part)['error']}")

                turn = open_.get(rid)
                if turn is None:
                    continue

                # Partial answers only prove that the server is alive; parsing them would cost time.
                if _GROWING.search(part):
                    turn.heard = time.monotonic()
                    continue

                del open_[rid]
                if not turn.answer.done():
                    turn.answer.set_result(json.loads(part))
        except ServerError as error:
            failure = error
            if len(turns) > 1 and not isinstance(error, ServerUnreachable):
                # Post them one by one, to find the request that the server refuses.
                for turn in open_.values():
                    self._start(self._post([turn]))
                open_.clear()
        finally:
            watching.cancel()
            _fail(open_.values(), failure)

    async def _watch(self, open_: dict[str, _Turn]) -> None:
        """Fail the turns that were silent for too long."""
        while open_:
            await asyncio.sleep(self._timeout / 4)
            late = time.monotonic() - self._timeout
            for rid in [rid for rid, turn in open_.items() if turn.heard < late]:
                silent = ServerUnreachable(f"/generate of {rid}: nothing for {self._timeout:g} s")
                _fail([open_.pop(rid)], silent)
                self._start(self._abandoned(rid))

    async def _abandoned(self, rid: str) -> None:
        with contextlib.suppress(ServerError):  # the request or its server may have ended
            await self._abort(rid)


def _fail(turns: Iterable[_Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)


def joined_body(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the bodies of requests that differ only in id, prompt and sampling into the body of one POST.

    >>> joined_body([{"rid": "a", "input_ids": [1], "sampling_params": {}, "priority": 0}])["rid"]
    'a'
    """
    if len(bodies) == 1:
        return {**bodies[0], "stream": True}

    columns = {name: [body[name] for body in bodies] for name in _COLUMNS}
    return {**bodies[0], **columns, "stream": True}
