"""The HTTP server of a rollout worker: keys, limits, and routes to the dialects.

    key of an attempt: `Authorization: Bearer KEY`, `x-api-key: KEY`, or the path /session/KEY/...
    POST /v1/chat/completions, /v1/responses, /v1/messages, /inference/v1/generate
    GET /v1/models, /health, /openapi.json (`rlpipe.serve.openapi` describes all of them)

A key is made for each attempt and is valid until the attempt ends. A request that cannot be answered gets an
error in the form of its dialect: 400 malformed, or beyond a limit of the attempt; 401 no key of a running
attempt; 408 not sent in time; 413 too large; 429 too many concurrent requests; 503 the engine failed. Streams
begin at once and are kept alive while a turn is generated, but a turn is sent only when it is complete. If a
client disconnects, its request ends.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from socket import socket
from types import ModuleType
from typing import Any

from aiohttp import web

from rlpipe.config.env import ToolParser
from rlpipe.envs.base import AgentAddress
from rlpipe.envs.tools.parsers import strict_json
from rlpipe.rollout.agents import AgentAttempt
from rlpipe.serve import chat, generate, messages, openapi, responses
from rlpipe.serve.requests import ApiError, flag_of
from rlpipe.serve.session import Session

MAX_BODY = 32 << 20  # bytes
READ_S = 60.0  # time limit for receiving a body
_PING_S = 5.0  # interval of the signals that keep a stream alive
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


class AgentServer:
    """Implements `rlpipe.rollout.agents.AgentEndpoint`; starts to listen with the first attempt.

    host: address to listen on. parser: parses the model's syntax for tool calls.
    """

    def __init__(self, host: str, parser: ToolParser) -> None:
        self._host, self._parser = host, parser
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._root_url = ""
        self._starting = asyncio.Lock()

    async def open(self, attempt: AgentAttempt) -> Session:
        """Start to serve an attempt."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        key = secrets.token_urlsafe(24)
        listeners: list[asyncio.Server] = []
        loop = asyncio.get_running_loop()

        async def answer_at(listener: socket) -> None:
            # Agents run in another loop than this server.
            answering = asyncio.run_coroutine_threadsafe(self._answer_at(listener, listeners), loop)
            await asyncio.wrap_future(answering)

        def on_close() -> None:
            del self._sessions[key]
            for listener in listeners:
                listener.close()

        address = AgentAddress(root_url=self._root_url, api_key=key, answer_at=answer_at)
        self._sessions[key] = session = Session(attempt, self._parser, address, on_close=on_close)
        return session

    async def _answer_at(self, listener: socket, listeners: list[asyncio.Server]) -> None:
        """Answer connections on a listening socket; the server for it is added to `listeners`."""
        assert self._runner is not None and self._runner.server is not None, "an attempt is served"
        loop = asyncio.get_running_loop()
        listeners.append(await loop.create_server(self._runner.server, sock=listener))

    async def close(self) -> None:
        """Stop serving and end running requests."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _start(self) -> None:
        """Listen. Raises ValueError when the address cannot be used."""
        runner = web.AppRunner(
            self._application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, 0).start()
        except OSError as error:
            await runner.cleanup()
            raise ValueError(
                f"env.agent.host={self._host!r} cannot be used ({error}): name an address of this machine."
            ) from error
        self._runner = runner
        port = runner.addresses[0][1]
        self._root_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"

    def _application(self) -> web.Application:
        """Return the routes; a key may be part of the path, for clients that cannot send headers."""
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
        for prefix in ("", "/session/{key}"):
            for path, dialect in (
                ("/v1/chat/completions", chat),
                ("/v1/responses", responses),
                ("/v1/messages", messages),
            ):
                app.router.add_post(prefix + path, self._handler(dialect))
            app.router.add_post(f"{prefix}/inference/v1/generate", self._generate)
            app.router.add_get(f"{prefix}/v1/models", self._models)

        app.router.add_get("/health", _health)
        app.router.add_get("/openapi.json", _openapi)
        return app

    def _session_of(self, request: web.Request) -> Session:
        """Return the attempt that a request's key belongs to. Raises ApiError."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        named = (request.match_info.get("key"), request.headers.get("x-api-key"), bearer)
        session = next((self._sessions[key] for key in named if key in self._sessions), None)
        if session is None:
            raise ApiError(
                401, "no running attempt has this key: use the one that the agent was given.", "key"
            )
        return session

    def _handler(self, dialect: ModuleType) -> Handler:
        """Return the handler of a dialect's route."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request)
            body = await _body(request)
            asked, streams = dialect.request_of(body), flag_of(body, "stream")
            name, created = secrets.token_hex(12), int(time.time())

            # When the client disconnects, aiohttp cancels this coroutine, and the turn with it.
            work = asyncio.ensure_future(session.chat(asked))
            try:
                if streams:
                    stream = _Stream(request, dialect)
                    return await stream.send(
                        work, lambda replies: dialect.events(replies, body, name, created)
                    )
                return web.json_response(
                    dialect.answer(await work, body, name, created), headers=_noted(asked)
                )
            finally:
                work.cancel()

        return handle

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session_of(request), await _body(request)
        reply = await generate.reply_to(session, body)
        return web.json_response(generate.answer(reply, secrets.token_hex(12)))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """List the only model, with the context limit that agents need to shorten their history."""
        limit = self._session_of(request).max_context
        model = {
            "id": "policy",
            "object": "model",
            "created": 0,
            "owned_by": "rlpipe",
            "max_model_len": limit,
        }
        return web.json_response({"object": "list", "data": [model]})


class _Stream:
    """Server-sent events: keeps the connection alive while a turn is generated, then sends its events."""

    def __init__(self, request: web.Request, dialect: ModuleType) -> None:
        self._request, self._dialect = request, dialect

    async def send(
        self, work: asyncio.Future[Any], events: Callable[[Any], Iterator[tuple[str, Any]]]
    ) -> web.StreamResponse:
        """Send the events for the result of `work`. An error before the first event keeps its HTTP status."""
        await asyncio.wait({work}, timeout=_PING_S)
        if work.done() and work.exception() is not None:
            return await work

        response = web.StreamResponse(headers=_STREAM)
        await response.prepare(self._request)
        while not work.done():
            await response.write(b": generating\n\n")
            await asyncio.wait({work}, timeout=_PING_S)

        try:
            for kind, data in events(work.result()):
                await response.write(_server_sent(kind, data))
        except ApiError as failure:
            await response.write(_server_sent("error", self._dialect.error(failure)))
        await response.write_eof()
        return response


def _server_sent(kind: str, data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{f'event: {kind}' + chr(10) if kind else ''}data: {text}\n\n".encode()


def _noted(asked: Any) -> dict[str, str]:
    """Return a header that names the client's settings that the run overrides."""
    return {"x-rlpipe-overridden": ",".join(asked.overridden)} if asked.overridden else {}


async def _health(request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


async def _openapi(request: web.Request) -> web.StreamResponse:
    return web.json_response(openapi.document())


async def _body(request: web.Request) -> dict[str, Any]:
    """Read a request's JSON object. Raises ApiError when it is late or not a JSON object."""
    try:
        async with asyncio.timeout(READ_S):
            text = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:g} s.", "slow") from None

    try:
        body = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:100]}", "malformed") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.", "malformed")
    return body


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer errors in the form of the route's dialect."""
    error = messages.error if request.path.endswith("/v1/messages") else chat.error
    try:
        return await handler(request)
    except ApiError as failure:
        return web.json_response(error(failure), status=failure.status)
    except RecursionError:
        failure = ApiError(400, "the body is nested too deeply.", "malformed")
        return web.json_response(error(failure), status=400)
    except web.HTTPException as failure:
        reason = ApiError(failure.status, f"{request.method} {request.path}: {failure.reason}.", "http")
        allowed = {"Allow": failure.headers["Allow"]} if "Allow" in failure.headers else {}
        return web.json_response(error(reason), status=failure.status, headers=allowed)
