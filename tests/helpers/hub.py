"""A stand-in for the Hugging Face hub: the HTTP protocol by which huggingface_hub gets files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_loopback"


@dataclass
class Hub:
    """url: of the server. repositories: id ("datasets/ID" of data) -> revision -> folder. gated: ids.
    requests: what was asked.

    break_after: bytes after which a download is cut off, as often as breaks says.
    """

    url: str = ""
    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    break_after: int = 0
    breaks: int = 0

    def add(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision of a repository; returns its commit."""
        self.repositories.setdefault(repo, {})[revision] = folder
        return self.commit(repo, revision)

    @staticmethod
    def commit(repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo} {revision}".encode()).hexdigest()

    def folder(self, repo: str, revision: str) -> Path | None:
        """The folder of a revision, by its name or its commit."""
        for name, folder in self.repositories.get(repo, {}).items():
            if revision in (name, self.commit(repo, name)):
                return folder
        return None


def _blob(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            headers.setdefault("Content_Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.requests.append((self.command, path, self.headers.get("Range") or ""))
            parts = path.split("/")
            is_api, is_data = parts[0] == "api", "datasets" in parts[:2]
            parts = parts[2:] if is_api else parts[is_data:]
            repo = "/".join((*["datasets"] * is_data, *parts[:2]))
            if is_api:
                kind, revision = parts[2:4] or ("revision", "main")
                revision = "/".join(parts[3:]) if kind == "revision" and len(parts) > 3 else revision
                name = "/".join(parts[4:]) if kind == "tree" else ""
            else:
                kind, revision, name = parts[2], parts[3], "/".join(parts[4:])

            revision = revision.replace("%2F", "/")
            if repo not in hub.repositories:
                return self.refuse(404, "RepoNotFound")
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}" and name != "":
                return self.refuse(403, "GatedRepo")
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "GatedRepo")
            folder = hub.folder(repo, revision)
            if folder is None:
                return self.refuse(404, "RevisionNotFound")

            known = next(n for n in hub.repositories[repo] if revision in (n, hub.commit(repo, n)))
            commit = hub.commit(repo, known)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            if kind == "revision":
                siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
                own = repo.removeprefix("datasets/")
                body = {"id": own, "modelId": own, "sha": commit, "siblings": siblings, "private": False}
                return self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
            if kind in ("tree", "paths-info"):
                asked = None if kind == "tree" else self.asked_paths()
                rows = [
                    {
                        "type": "file",
                        "path": str(file.relative_to(folder)),
                        "size": file.stat().st_size,
                        "oid": _blob(file)[:40],
                    }
                    for file in files
                    if asked is None or str(file.relative_to(folder)) in asked
                ]
                return self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
            return self.send_file(folder / name, commit)

        do_HEAD = do_POST = do_GET

        def asked_paths(self) -> list[str]:
            """The paths that a request for their facts names, in a form or as JSON."""
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            if "json" in self.headers.get("Content-Type", ""):
                return list(json.loads(body)["paths"])
            return urllib.parse.parse_qs(body).get("paths", [])

        def send_file(self, file: Path, commit: str) -> None:
            if not file.is_file():
                return self.refuse(404, "EntryNotFound")
            content, status, extra = file.read_bytes(), 200, {}
            total = len(content)
            if range_ := self.headers.get("Range"):
                start = int(range_.removeprefix("bytes=").partition("-")[0])
                content, status = content[start:], 206
                extra = {"Content_Range": f"bytes {start}-{total - 1}/{total}"}

            headers = {
                "ETag": f'"{_blob(file)}"',
                "X_Repo_Commit": commit,
                "Accept_Ranges": "bytes",
                "Content_Length": str(len(content)),
                **extra,
            }
            if self.command == "GET" and hub.breaks and len(content) > hub.break_after:
                hub.breaks -= 1
                self.close_connection = True
                content = content[: hub.break_after]
            return self.answer(status, content, **headers)

    return Handler


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve on loopback until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
