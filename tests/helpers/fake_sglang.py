"""A server process that speaks as much of SGLang's HTTP as the engine needs, and starts in no time.

    python fake_sglang.py PORT VERSION FOLDER --config FILE

It answers to the key in FILE alone, which it reads as SGLang does: put in front of the command line, all
parsed by argparse. It decodes the token 7. FOLDER/broken makes it end at once; FOLDER/slow makes answers
take long; FOLDER/deaf makes it answer no question; FOLDER/trickle makes the tokens of a turn come one every
fifth of a second; FOLDER/deadly makes it end when weights arrive; every weight update is a line in
FOLDER/updates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml


class Handler(BaseHTTPRequestHandler):
    """One request."""

    version = "0"
    key = ""
    folder = Path()

    def do_GET(self) -> None:
        while (self.folder / "deaf").exists():
            time.sleep(0.02)
        info = self.folder / "info"
        if self._may():
            self._say(json.loads(info.read_text()) if info.exists() else {"ok": True})

    def _may(self) -> bool:
        allowed = self.headers["Authorization"] == f"Bearer {self.key}"
        if not allowed:
            self.send_error(401)
        return allowed

    def do_POST(self) -> None:
        if not self._may():
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/update_weights"):
            if (self.folder / "deadly").exists():
                (self.folder / "deadly").unlink()
                os._exit(1)
            Handler.version = body["weight_version"] or Handler.version
            with (self.folder / "updates").open("a") as log:
                log.write(f"{Handler.version}\n")
        if self.path == "/generate":
            asked = body["sampling_params"]
            if isinstance(asked, list):
                self._play(
                    [(rid, one["max_new_tokens"]) for rid, one in zip(body["rid"], asked, strict=True)]
                )
            else:
                self._play([(body["rid"], asked["max_new_tokens"])])
        else:
            self._say({"ok": True})

    def _play(self, turns: list[tuple[str, int]]) -> None:
        """Turns of so many tokens, streamed as SGLang does."""
        while (self.folder / "slow").exists():
            time.sleep(0.02)
        self.send_response(200)
        self.end_headers()
        if (self.folder / "trickle").exists():
            for some in range(1, max(count for _, count in turns)):
                for rid, count in turns:
                    if some < count:
                        self._tell(json.dumps(self._turn(rid, some, None)))
                time.sleep(0.2)
        for rid, count in turns:
            self._tell(json.dumps(self._turn(rid, count, {"type": "length"})))
        self._tell("[DONE]")

    def _tell(self, event: str) -> None:
        self.wfile.write(f"data: {event}\n\n".encode())
        self.wfile.flush()

    def _turn(self, rid: str, count: int, finished: dict | None) -> dict:
        meta = {
            "id": rid,
            "finish_reason": finished,
            "output_token_logprobs": [[-1.0, 7, None]] * count,
            "weight_version": Handler.version,
            "weight_versions": [{"version": Handler.version, "start": 0, "end": count}],
        }
        return {"output_ids": [7] * count, "meta_info": meta}

    def _say(self, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for word in ("port", "version", "folder", "--config", "--api-key"):
        parser.add_argument(word)
    settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    first = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    asked = parser.parse_args(first + sys.argv[1:])
    Handler.version, Handler.folder, Handler.key = asked.version, Path(asked.folder), asked.api_key
    if (Handler.folder / "broken").exists():
        print("a line before the cause\n" * 40, flush=True)
        sys.exit("broken on purpose")
    ThreadingHTTPServer(("127.0.0.1", int(asked.port)), Handler).serve_forever()
