"""Turns in flight on one server: their ids on the server, their parts, and their counters.

Owns tasks that the server does not perform. A turn ends at exactly the requested stop tokens: if the server
stops at the model's end token instead, the turn is continued. Requests that would kill the server are refused
(an unknown token id ends its process). All request ids have the same length: the server aborts by prefix, so
with equal lengths aborting one request never aborts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models import Architecture
from rlpipe.rollout.engine import EngineStats, check_request
from rlpipe.rollout.sglang.answers import continuation, generate_body, parse_answer
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.routes import read_routes
from rlpipe.rollout.turn import empty_result, joined
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult
from rlpipe.weights.protocols import ServerUnreachable

_SILENT_TOKENS = 256  # tokens between two parts of a turn if only the end is needed


class Turns:
    """Turns in flight. Used from the engine's event loop; `stats` and `check` from any thread.

    vocab: vocabulary size of the model. arch: the model's architecture if its experts are recorded, else
    None.
    """

    def __init__(
        self, config: RolloutConfig, spec: SpecConfig, *, vocab: int, arch: Architecture | None = None
    ) -> None:
        self._config, self._spec, self._vocab, self._arch = config, spec, vocab, arch
        self._running: dict[str, str] = {}  # request id -> its id inside the server
        self._waiting: dict[str, asyncio.Future[None]] = {}  # request id -> done when aborted
        self._aborted: set[str] = set()  # aborted requests that the server has not answered yet
        self._stats = EngineStats()
        self._busy_since: float | None = None

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError for an impossible request, before it is sent to the server."""
        check_request(request, self._vocab, self._spec.mode)

    async def admitted(
        self, request: GenerateRequest, serving: Coroutine[Any, Any, SglangClient]
    ) -> SglangClient | None:
        """Wait for the server; None if the request is aborted first. Raises the errors of `serving`."""
        if request.request_id in self._waiting:
            serving.close()
            raise _already_running(request.request_id)

        server = asyncio.ensure_future(serving)
        aborted = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({server, aborted}, return_when=asyncio.FIRST_COMPLETED)
            return None if aborted.done() else server.result()
        finally:
            server.cancel()
            del self._waiting[request.request_id]

    async def run(
        self,
        client: SglangClient,
        request: GenerateRequest,
        *,
        priority: int = 0,
        stream: bool = False,
        done: GenerateResult | None = None,
    ) -> AsyncIterator[GenerateResult]:
        """Run one turn and yield it; with `stream`, first yield partial results (finish_reason ABORT).

        done: the part that a server sent before it failed. For a prompt that fills the context the result has
        no token and finish_reason LENGTH. Raises ServerError, and ValueError for an id that is already
        running.
        """
        capacity = self._config.max_context - len(request.prompt_ids)
        if capacity < 1:
            yield empty_result(request, FinishReason.LENGTH)
            return

        max_new_tokens = min(capacity, request.sampling.max_new_tokens)
        request = replace(request, sampling=replace(request.sampling, max_new_tokens=max_new_tokens))

        # Send one request, and more if the server stops too early or has failed before.
        turn = done and _settled(request, done)
        while turn is None or turn is done or self._continues(request, turn):
            remaining = request if turn is None else continuation(request, turn)
            part: GenerateResult | None = None
            meta: dict[str, Any] = {}
            async with self._registered(request.request_id) as rid:
                body = generate_body(remaining, rid, priority)
                async for answer in _answers(client, body, stream=stream):
                    meta = answer["meta_info"]
                    part = parse_answer(remaining, answer, part.versions if part else ())
                    if not meta.get("finish_reason"):
                        yield part if turn is None else joined(turn, part)
            assert part is not None  # `_answers` yields at least once

            if self._arch is not None and remaining.sampling.routes:
                part.routes_from = remaining.sampling.routes_from
                tokens = len(remaining.prompt_ids) + len(part.output_ids) - part.routes_from
                part.routes = read_routes(self._arch, meta, tokens)

            self._count(part, len(remaining.prompt_ids) - int(meta.get("cached_tokens") or 0))
            turn = part if turn is None else joined(turn, part)
        yield turn

    def abort_waiting(self, request_ids: Iterable[str] | None) -> None:
        """End requests that wait for a server. request_ids: None for all."""
        for request_id in list(self._waiting if request_ids is None else request_ids):
            aborted = self._waiting.get(request_id)
            if aborted is not None and not aborted.done():
                aborted.set_result(None)

    async def abort(self, client: SglangClient, request_ids: Sequence[str] | None) -> None:
        """End some requests (None: all) with the tokens so far."""
        self.abort_waiting(request_ids)
        running = {
            request_id: rid
            for request_id, rid in self._running.items()
            if request_ids is None or request_id in request_ids
        }

        # Store the ids: if the server is lost before it answers, no other server may run these requests.
        self._aborted.update(running)

        if request_ids is None:
            await self.abort_running(client)
            return
        for rid in running.values():
            await client.post("/abort_request", {"rid": rid})

    def take_aborted(self, request_id: str) -> bool:
        """Return whether a request was aborted before its server was lost; then it must not run again."""
        aborted = request_id in self._aborted
        self._aborted.discard(request_id)
        return aborted

    async def abort_running(self, client: SglangClient) -> None:
        """End all requests on the server with their tokens so far, but not those that wait for a server."""
        await client.post("/abort_request", {"rid": "", "abort_all": True})

    async def wait_until_idle(self, timeout: float = 10.0) -> None:
        """Wait until no request runs, or `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def stats(self) -> EngineStats:
        """Return sums over finished parts; busy_seconds is the time with at least one running request."""
        stats = copy.deepcopy(self._stats)
        stats.running, stats.waiting = len(self._running), len(self._waiting)
        stats.busy_seconds += self._busy_for()
        return stats

    def _continues(self, request: GenerateRequest, result: GenerateResult) -> bool:
        """Return whether the server stopped at an unrequested token and more tokens are allowed."""
        stops = request.sampling.stop_token_ids
        if result.finish_reason is not FinishReason.STOP or result.output_ids[-1] in stops:
            return False

        # The server also stops at the model's end tokens, even if these were not requested.
        if len(result.output_ids) < request.sampling.max_new_tokens:
            return True
        result.finish_reason = FinishReason.LENGTH
        return False

    @contextlib.asynccontextmanager
    async def _registered(self, request_id: str) -> AsyncIterator[str]:
        """Count a request as running, and yield its id inside the server; all ids have one length."""
        if request_id in self._running:
            raise _already_running(request_id)
        if not self._running:
            self._busy_since = time.monotonic()
        rid = self._running[request_id] = uuid.uuid4().hex
        try:
            yield rid
            self._aborted.discard(request_id)
        finally:
            del self._running[request_id]
            if not self._running:
                self._stats.busy_seconds += self._busy_for()
                self._busy_since = None

    def _count(self, part: GenerateResult, prefilled: int) -> None:
        stats = self._stats
        stats.generated_tokens += len(part.output_ids)
        stats.prefill_tokens += prefilled
        stats.row_steps += part.spec.verify_steps or len(part.output_ids)
        stats.spec.add(part.spec)

    def _busy_for(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since


async def _answers(
    client: SglangClient, body: dict[str, Any], *, stream: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield the server's partial answers with `stream`, else only the last one.

    Both cases stream answers, so that the client's timeout counts from the last tokens received.
    """
    if not stream:
        silent = body["sampling_params"] | {"stream_interval": _SILENT_TOKENS}
        yield await client.generate(body | {"sampling_params": silent})
        return

    answer = None
    async for answer in client.stream(body):
        yield answer
    if answer is None:
        raise ServerUnreachable(f"/generate of {body['rid']} ended without an answer")


def _settled(request: GenerateRequest, done: GenerateResult) -> GenerateResult:
    """Return `done` unchanged if more tokens must follow, else with the finish reason that is missing."""
    if len(done.output_ids) and done.output_ids[-1] in request.sampling.stop_token_ids:
        return replace(done, finish_reason=FinishReason.STOP)
    if len(done.output_ids) >= request.sampling.max_new_tokens:
        return replace(done, finish_reason=FinishReason.LENGTH)
    return done


def _already_running(request_id: str) -> ValueError:
    return ValueError(f"request_id={request_id!r} is already running; ids must be unique.")
