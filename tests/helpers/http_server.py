"""An HTTP/1.1 server in the event loop of a test, whose answers are a function's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Served:
    """url: of the server. connections: how many were made."""

    url: str = ""
    connections: int = 0
    open: set[asyncio.StreamWriter] = field(default_factory=set)


@contextlib.asynccontextmanager
async def serving(
    answer: Callable[[str, bytes], Awaitable[tuple[int, AsyncIterator[bytes] | bytes]]],
) -> AsyncIterator[Served]:
    """Answers with what `answer(path, body)` gives: status and body, in chunks where it is an iterator."""
    served = Served()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        served.open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                sizes = [line for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0].partition(":")[2])) if sizes else b""
                status, content = await answer(head[0].split()[1], body)
                writer.write(f"HTTP/1.1 {status} x\r\n".encode())
                if isinstance(content, bytes):
                    writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
                else:
                    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                    async for part in content:
                        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                        await writer.drain()
                    writer.write(b"0\r\n\r\n")
                await writer.drain()
        served.open.discard(writer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        for writer in served.open:
            writer.close()
        server.close()
