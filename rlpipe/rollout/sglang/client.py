"""HTTP client of one server: JSON, errors with the server's message, retries where they are safe.

Owns no state of the engine. `read` repeats requests that change nothing. All other requests are sent once,
because a weight update or a generation must not happen twice without the caller's knowledge. Generations use
`wire`, all other requests httpx.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from rlpipe.rollout.sglang.batches import Batches
from rlpipe.rollout.sglang.wire import Wire
from rlpipe.weights.protocols import ServerError, ServerUnreachable

_CONNECT_SECONDS = 5.0
_READ_ATTEMPTS = 4
_GENERATE = "/generate"


class SglangClient:
    """HTTP client of one server. Used from one event loop.

    url: address of the server. timeout: seconds that an answer may take. key: API key, sent with every
    request.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        key: str = "",
    ) -> None:
        self._url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            # The server is on this machine, so ignore proxies in environment variables.
            trust_env=False,
            transport=transport,
        )
        self._wire = Wire(url, key, timeout)
        self._batches = Batches(partial(self._wire.events, _GENERATE), self._abort, timeout)

    async def read(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request that changes nothing (GET, or POST with a body); retry if unreachable."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ServerUnreachable),
            stop=stop_after_attempt(_READ_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=2),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._send("GET" if body is None else "POST", path, body)
        raise AssertionError("unreachable: the last attempt raises")

    async def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """Send once. timeout: seconds, None for the client's. Raises ServerError, ServerUnreachable."""
        return await self._send("POST", path, body, timeout=timeout)

    async def answers(self, path: str, timeout: float | None = _CONNECT_SECONDS) -> bool:
        """Return whether the server answers `path` with success within `timeout` seconds (None: no limit)."""
        if self._client.is_closed:
            return False
        try:
            return (await self._client.get(path, timeout=timeout)).is_success
        except httpx.HTTPError:
            return False

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the partial answers of one generation; each contains all tokens so far."""
        self._require_open(_GENERATE)
        async for part in self._wire.events(_GENERATE, json.dumps({**body, "stream": True}).encode()):
            event = json.loads(part)
            if "error" in event:
                raise ServerError(f"{self._url}{_GENERATE}: {event['error']}")
            yield event

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete answer of one generation, which may share a POST with others (`batches`)."""
        self._require_open(_GENERATE)
        return await self._batches.answer(body)

    async def close(self) -> None:
        """Close connections; running generations fail."""
        await self._client.aclose()
        self._batches.close()
        self._wire.close()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout: float | None = None
    ) -> Any:
        """Send a request; return its JSON. Raises ServerUnreachable, or ServerError with the answer."""
        self._require_open(path)
        content = None if body is None else dict(body)
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            # No answer means a dead or hung server, which is replaced; an error answer is raised to the
            # caller.
            response = await self._client.request(method, path, json=content, timeout=limit)
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self._url}{path} did not answer: {error!r}") from error
        if not response.is_success:
            raise ServerError(self._failure(path, response, response.content))
        return response.json() if response.content else None

    async def _abort(self, rid: str) -> None:
        if not self._client.is_closed:
            await self.post("/abort_request", {"rid": rid})

    def _require_open(self, path: str) -> None:
        """Raise ServerUnreachable if this client was closed, because its server was replaced."""
        if self._client.is_closed:
            raise ServerUnreachable(f"{self._url}{path} is not there any more: the server was replaced.")

    def _failure(self, path: str, response: httpx.Response, content: bytes) -> str:
        return f"{self._url}{path} answered {response.status_code}: {content[:500].decode(errors='replace')}"
