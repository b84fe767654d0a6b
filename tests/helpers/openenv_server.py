"""A server that speaks OpenEnv's protocol: /schema over HTTP, sessions over /ws.

Its frames are those that openenv 0.10.0 sent to the same client. By default the seed is to be guessed: 99
fails as an environment that raises does, 98 closes the connection, and 97 is answered too late. `walk` is the
environment of recipes/walk.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import Request, Response, ServerConnection, serve

from recipes.walk.walk import Walk

SCHEMA = {
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["number"],
}
WALK_SCHEMA = {
    "properties": {"move": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["move"],
}


@contextmanager
def openenv_server(
    schema: dict[str, Any] | None = None,
    sessions: int = 8,
    session: Callable[[ServerConnection], None] | None = None,
) -> Iterator[str]:
    """Serve on loopback, and give the address. session: plays one, until its client leaves."""

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        body = json.dumps({"action": schema or SCHEMA, "observation": {}, "state": {}})
        return connection.respond(200 if request.path == "/schema" else 404, body)

    places = threading.Semaphore(sessions)

    def play(socket: ServerConnection) -> None:
        if not places.acquire(blocking=False):
            socket.send(_error("CAPACITY_REACHED", "no session is free"))
            return
        try:
            (session or guess)(socket)
        finally:
            places.release()

    with serve(play, "127.0.0.1", 0, process_request=answer_http) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.socket.getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.shutdown()
            thread.join()


def walk(socket: ServerConnection) -> None:
    """Play recipes/walk."""
    for frame in socket:
        message = json.loads(frame)
        if message["type"] == "reset":
            one = Walk(message["data"]["seed"])
            socket.send(_seen(one.show(), 0.0, done=False, steps=0))
        else:
            reward, done = one.step(message["data"]["move"])
            socket.send(_seen(one.show(), reward, done=done, steps=one.steps))


def guess(socket: ServerConnection) -> None:
    """Have the seed guessed."""
    number = steps = 0
    for frame in socket:
        message = json.loads(frame)
        if message["type"] == "reset":
            number, steps = message["data"]["seed"] + message["data"].get("plus", 0), 0
            socket.send(_seen("Guess.", 0.0, done=False, steps=0))
            continue

        guess, steps = message["data"].get("number", message["data"].get("text")), steps + 1
        if not isinstance(guess, int):
            socket.send(_error("VALIDATION_ERROR", "Invalid message"))
        elif guess == 99:
            socket.send(_error("EXECUTION_ERROR", "boom"))
        elif guess == 98:
            return
        elif guess == 97:
            time.sleep(1.0)
        else:
            text = "over" if guess == number else "higher" if guess < number else "lower"
            reward = 1.0 if guess == number else -0.1
            socket.send(_seen(text, reward, done=guess == number, steps=steps))


def _seen(text: str, reward: float, *, done: bool, steps: int) -> str:
    observation = {"text": text, "metadata": {"steps": steps}}
    data = {"observation": observation, "reward": reward, "done": done, "metadata": {"steps": steps}}
    return json.dumps({"type": "observation", "data": data})


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})
