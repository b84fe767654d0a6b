"""The live page: `python -m rlpipe.report RUN --watch` serves the report and renews it while a run goes on.

Owns a small HTTP server on this machine; the page asks it for news every two seconds. What is served is made
when the files of the runs have changed, once for all readers.

    GET /        the page          GET /stamp   changes with the files
    GET /news    {"body", "data", "trajectories"} of the newest state
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from rlpipe.metrics.runs import dump
from rlpipe.report.write import Content, load_runs, make_content, pack, page

WATCHED = ("metrics.jsonl", "events.jsonl")


class Live:
    """The newest content of some runs; thread-safe."""

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._dirs = [Path(path) for path in run_dirs]
        self._lock = Lock()
        self._made_at = ""
        self._content: Content | None = None

    def stamp(self) -> str:
        """Changes when a file does."""
        files = [directory / name for directory in self._dirs for name in WATCHED]
        seen = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists()]
        return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()

    def content(self) -> Content:
        """Made anew when the stamp changed. Raises ValueError when a directory is no run directory."""
        with self._lock:
            stamp = self.stamp()
            if self._content is None or stamp != self._made_at:
                self._content, self._made_at = make_content(load_runs(self._dirs)), stamp
            return self._content

    def news(self) -> str:
        """JSON: what the page replaces."""
        content = self.content()
        packed = pack(dump(content.trajectories)) if content.trajectories else ""
        return json.dumps({"body": content.body, "data": content.data(), "trajectories": packed})


def make_server(run_dirs: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """A server that is not running yet; port 0 takes a free one.

    Raises ValueError when a directory is no run directory, OSError when the port is taken.
    """
    live = Live(run_dirs)
    live.content()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "/": (lambda: page(live.content(), live=True), "text/html"),
                "/stamp": (live.stamp, "text/plain"),
                "/news": (live.news, "application/json"),
            }
            if self.path not in answers:
                self.send_error(404)
                return
            make, kind = answers[self.path]
            body = make().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are not worth a line."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server
