"""Server-sent events over HTTP/1.1 on kept connections, as bytes: what a turn of ten tokens can afford.

httpx takes one to two milliseconds of processor time for a request and its answer, which is most of what such
a turn costs a worker; this is a tenth of it. It knows as much of HTTP as SGLang's `/generate` needs: POST,
bodies in chunks, of a stated length, or until the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from rlpipe.weights.protocols import ServerError, ServerUnreachable

_CONNECT_SECONDS = 30.0  # a server under load accepts late; one that died refuses at once
_KEPT = 64  # connections without a request
_BUFFER = 1 << 20  # bytes that are read ahead
_SHOWN = 500  # bytes of an error's body
_DONE = b"[DONE]"


class Wire:
    """Used from one event loop. url: of the server. key: sent with every request. timeout: seconds between
    two parts of an answer."""

    def __init__(self, url: str, key: str, timeout: float) -> None:
        parts = urlsplit(url)
        self._url, self._host, self._port, self._timeout = url, parts.hostname, parts.port or 80, timeout
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""
        self._kept: list[_Connection] = []
        self._closed = False

    async def events(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """What stands behind each `data:` of the answer to a POST of JSON, until `[DONE]`.

        Raises ServerError when the server refuses, ServerUnreachable when it breaks off or is silent.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection, ended = None, False
        try:
            connection, status, headers = await self._asked(head.encode() + body)
            parts = connection.parts(headers)
            if status != 200:
                said = b"".join([part async for part in parts])
                raise ServerError(f"{self._url}{path} answered {status}: {_shown(said)}")
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and not ended:
                        ended = line[6:].rstrip() == _DONE
                        if not ended:
                            yield line[6:]
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
            raise ServerUnreachable(f"{self._url}{path} broke off: {error!r}") from error
        finally:
            if connection is not None:
                self._release(connection, whole=ended)

    def close(self) -> None:
        """Drop connections; what is on its way breaks off."""
        self._closed = True
        while self._kept:
            self._kept.pop().close()

    async def _asked(self, request: bytes) -> tuple[_Connection, int, dict[bytes, bytes]]:
        """Send, and read the head of the answer; on a new connection where a kept one had ended meanwhile."""
        while self._kept:
            connection = self._kept.pop()
            try:
                return connection, *await connection.ask(request)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                connection.close()
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
            return connection, *await connection.ask(request)
        except BaseException:
            connection.close()
            raise

    def _release(self, connection: _Connection, *, whole: bool) -> None:
        if whole and connection.again and not self._closed and len(self._kept) < _KEPT:
            self._kept.append(connection)
        else:
            connection.close()


class _Connection:
    """One connection. again: whether the answer that is read leaves it usable."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float) -> None:
        self._reader, self._writer, self._timeout = reader, writer, timeout
        self.again = False

    async def ask(self, request: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers, names in lower case."""
        self.again = False
        self._writer.write(request)
        async with asyncio.timeout(self._timeout):
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        pairs = (line.partition(b":") for line in lines if line)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def parts(self, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
        """The body as it comes."""
        stays = headers.get(b"connection", b"").lower() != b"close"
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
            stays = False
            while True:
                async with asyncio.timeout(self._timeout):
                    part = await self._reader.read(_BUFFER)
                if not part:
                    break
                yield part
        self.again = stays

    def close(self) -> None:
        self._writer.close()


def _shown(body: bytes) -> str:
    return body[:_SHOWN].decode(errors="replace")
