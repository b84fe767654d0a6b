"""The live page: `rlpipe report RUN --watch` serves the report and updates it while a run continues.

Owns a small HTTP server on this machine; the page polls it every two seconds. If the files of the runs have
changed, the content is rebuilt once for all readers.

    GET /        the page          GET /stamp   digest of the state of the files
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
        """Return a digest of the sizes and times of the files; it changes if a file changes."""
        files = [directory / name for directory in self._dirs for name in WATCHED]
        states = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists()]
        return hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()

    def content(self) -> Content:
        """Return the content, rebuilt if the stamp changed.

        Raises ValueError if a directory is not a run directory.
        """
        with self._lock:
            stamp = self.stamp()
            if self._content is None or stamp != self._made_at:
                self._content, self._made_at = make_content(load_runs(self._dirs)), stamp
            return self._content

    def news(self) -> str:
        """Return the parts that the page replaces, as JSON."""
        content = self.content()
        packed = pack(dump(content.trajectories)) if content.trajectories else ""
        return json.dumps({"body": content.body, "data": content.data(), "trajectories": packed})


def make_server(run_dirs: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that is not running yet. port: 0 selects a free port.

    The server rejects requests whose host name is not one of this machine, because a foreign page could send
    them by DNS rebinding. Raises ValueError if a directory is not a run directory, and OSError if the port is
    in use.
    """
    names = {name.lower() for name in (host, "localhost", socket.gethostname(), socket.getfqdn())}

    # Read the runs now, so that an error occurs here rather than at the first request.
    live = Live(run_dirs)
    live.content()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # By DNS rebinding, a foreign page can send requests to this server under another host name.
            if not is_allowed_host(self.headers.get("Host", ""), names):
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
            """Do not log requests."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server


def is_allowed_host(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header has a name of this machine or an IP address, which DNS cannot rebind.

    >>> hosts = ("LOCALHOST:80", "[::1]:80", "10.0.0.7", "evil.org", "")
    >>> [is_allowed_host(host, {"localhost"}) for host in hosts]
    [True, True, True, False, False]
    """
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name in names or bool(ip_address(name))
    except ValueError:
        return False
