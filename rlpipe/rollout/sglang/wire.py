"""Reads server-sent events over HTTP/1.1 as bytes, at low cost even for turns of ten tokens.

httpx takes one to two milliseconds of CPU time for a request and its answer, which is most of a worker's time
for such a turn; this module takes a tenth of that. Connections are reused. It implements only the parts of
HTTP that SGLang's `/generate` needs: POST, and bodies in chunks, with a content length, or up to the end of
the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from rlpipe.weights.protocols import ServerError, ServerUnreachable

_CONNECT_SECONDS = 30.0  # a busy server accepts late; a dead one refuses at once
_MAX_IDLE = 64  # idle connections
_BUFFER = 1 << 20  # bytes to read ahead
_MAX_ERROR = 500  # bytes of an error's body that a message quotes
_DONE = b"[DONE]"


class Wire:
    """HTTP client for `/generate` of one server. Used from one event loop.

    url: address of the server. key: sent with every request. timeout: seconds between two parts of an answer.
    """

    def __init__(self, url: str, key: str, timeout: float) -> None:
        parts = urlsplit(url)
        self._url, self._host, self._port, self._timeout = url, parts.hostname, parts.port or 80, timeout
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []
        self._closed = False

    async def events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yield the content of each `data:` line of the answer to a POST of JSON, until `[DONE]`.

        Raises ServerError when the server refuses, ServerUnreachable when the connection breaks or is silent.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection, ended = None, False
        try:
            connection, status, headers = await self._send(head.encode() + body)
            parts = connection.parts(headers)
            if status != 200:
                message = b"".join([part async for part in parts])
                raise ServerError(f"{self._url}{path} answered {status}: {_shortened(message)}")

            incomplete = b""  # the last line of a part may continue in the next part
            async for part in parts:
                *lines, incomplete = (incomplete + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and not ended:
                        ended = line[6:].rstrip() == _DONE
                        if not ended:
                            yield line[6:]
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
            raise ServerUnreachable(f"{self._url}{path} broke off: {error!r}") from error
        finally:
            if connection is not None:
                self._release(connection, complete=ended)

    def close(self) -> None:
        """Close connections; running requests fail."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _send(self, request: bytes) -> tuple[_Connection, int, dict[bytes, bytes]]:
        """Send a request and read the head of the answer; if an idle connection has ended, open a new one."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, *await connection.send(request)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                connection.close()

                # A server closes idle connections without notice, but a partial answer is a real failure.
                if getattr(error, "partial", b""):
                    raise
            except BaseException:
                connection.close()
                raise

        if self._closed:
            raise ConnectionError("it is not there any more: the server was replaced")
        async with asyncio.timeout(_CONNECT_SECONDS):
            streams = await asyncio.open_connection(self._host, self._port, limit=_BUFFER)
        connection = _Connection(*streams, self._timeout)
        try:
            return connection, *await connection.send(request)
        except BaseException:
            connection.close()
            raise

    def _release(self, connection: _Connection, *, complete: bool) -> None:
        if complete and connection.reusable and not self._closed and len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()


class _Connection:
    """One connection. reusable: whether it can send another request after the last answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self._reader, self._writer, self._timeout = reader, writer, timeout
        self.reusable = False

    async def send(self, request: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Send a request; return status and headers of the answer, with names in lower case."""
        self.reusable = False
        self._writer.write(request)
        async with asyncio.timeout(self._timeout):
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")

        first, *lines = head.split(b"\r\n")
        pairs = (line.partition(b":") for line in lines if line)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def parts(self, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        stays_open = headers.get(b"connection", b"").lower() != b"close"

        # The body ends with a chunk of size 0, after the announced length, or with the connection.
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            while True:
                async with asyncio.timeout(self._timeout):
                    size = int((await self._reader.readline()).partition(b";")[0], 16)
                    part = await self._reader.readexactly(size + 2)
                if not size:
                    break
                yield part[:-2]
        elif b"content-length" in headers:
            async with asyncio.timeout(self._timeout):
                yield await self._reader.readexactly(int(headers[b"content-length"]))
        else:
            stays_open = False
            while True:
                async with asyncio.timeout(self._timeout):
                    part = await self._reader.read(_BUFFER)
                if not part:
                    break
                yield part
        self.reusable = stays_open

    def close(self) -> None:
        self._writer.close()


def _shortened(body: bytes) -> str:
    return body[:_MAX_ERROR].decode(errors="replace")
