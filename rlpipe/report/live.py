"""The live page: `rlpipe report RUN --watch` serves the report and renews it while a run goes on.

Owns a small HTTP server on this machine; the page asks it for news every two seconds. What is served is made
when the files of the runs have changed, once for all readers.

    GET /        the page          GET /stamp   changes with the files
    GET /news    {"body", "data", "trajectories"} of the newest state
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Collection, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

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

    It answers to addresses and names of this machine alone: a foreign page whose name was made to point here
    (DNS rebinding) sends that name along and gets nothing.
    Raises ValueError when a directory is no run directory, OSError when the port is taken.
    """
    names = {name.lower() for name in (host, "localhost", socket.gethostname(), socket.getfqdn())}
    live = Live(run_dirs)
    live.content()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not may_ask(self.headers.get("Host", ""), names):
                self.send_error(421, "Misdirected Request")
                return
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


def may_ask(host: str, names: Collection[str]) -> bool:
    """Whether a Host header names this machine: by a name of it, or by an address, which nobody can rebind.

    >>> [may_ask(host, {"localhost"}) for host in ("LOCALHOST:80", "[::1]:80", "10.0.0.7", "evil.org", "")]
    [True, True, True, False, False]
    """
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name in names or bool(ip_address(name))
    except ValueError:
        return False
