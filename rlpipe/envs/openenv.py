"""Environments on an OpenEnv server: `env=openenv env.openenv.url=http://127.0.0.1:8000`.

    an episode: connect to /ws, reset(seed) -> observation, step(action) -> observation, reward, done

Implements the client of OpenEnv's protocol (0.10), JSON over a WebSocket, without OpenEnv's package. The
server's `/schema` defines the action. If it has one required field, the model's answer is the value of that
field; if it has several, the answer must be a JSON object. If the schema rejects an answer, the model reads
the reason. Any other failure of the server is an InfrastructureError.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import described
from rlpipe.envs.base import InfrastructureError, StepResult
from rlpipe.envs.seeded import SeededSuite, opening, require


def check_openenv(config: EnvConfig) -> None:
    """Read the server's schema and start an episode. Raises ValueError if either fails."""
    require("websockets", extra="openenv")
    try:
        with closing(OpenEnvEpisode(config, _action_schema(config), 0)) as episode:
            episode.messages()
    except InfrastructureError as error:
        raise ValueError(f"{error}. Start the server, or correct env.openenv.url.") from error


def make_openenv(config: EnvConfig, seed: int) -> SeededSuite:
    """Make the suite that `env.openenv` configures. seed: the run's seed.

    Raises InfrastructureError if the server cannot be reached.
    """
    return SeededSuite(config, seed, partial(OpenEnvEpisode, config, _action_schema(config)))


class OpenEnvEpisode:
    """One session on the server."""

    def __init__(self, config: EnvConfig, schema: dict[str, Any], seed: int) -> None:
        from websockets.sync.client import connect

        self._config, self._seed = config, seed
        only = schema["required"][0] if len(schema["required"]) == 1 else ""
        self._field = config.openenv.action or only
        self._kind = schema["properties"].get(self._field, {}).get("type", "object")
        what = f"{self._field} ({self._kind})" if self._field else f"a JSON object: {json.dumps(schema)}"
        self._hint, self._open = f"Answer with {what}.", ExitStack()

        url = f"ws{config.openenv.url.rstrip('/').removeprefix('http')}/ws"
        try:
            opened = connect(url, open_timeout=config.openenv.timeout_s, max_size=None)
            self._socket = self._open.enter_context(opened)
        except Exception as error:  # OSError, a timeout, a rejected handshake
            raise InfrastructureError(f"env.openenv.url={config.openenv.url}: {described(error)}") from error

    def messages(self) -> list[dict[str, str]]:
        """Reset the environment; return its first observation and a description of actions."""
        result = self._request("reset", {"seed": self._seed, **self._config.openenv.reset})
        return opening(self._config, f"{self._text(result['observation'])}\n{self._hint}")

    def step(self, action: str) -> StepResult:
        """Send the text as an action."""
        try:
            sent = action.strip() if self._kind == "string" else json.loads(action)
            result = self._request("step", {self._field: sent} if self._field else sent)
        except ValueError as refusal:  # the text is not JSON or does not match the schema
            limit = self._config.max_observation_chars
            return StepResult(observation=f"error: {refusal}"[:limit] + f"\n{self._hint}")

        done, metadata = bool(result.get("done")), result.get("metadata") or {}
        info = {name: one for name, one in metadata.items() if isinstance(one, (int, float))}
        info["submitted"] = done
        seen = "" if done else self._text(result["observation"])
        return StepResult(observation=seen, done=done, reward=result.get("reward") or 0.0, info=info)

    def close(self) -> None:
        """End the session."""
        self._open.close()

    def _request(self, kind: str, data: object) -> dict[str, Any]:
        """Send a message and return the answer. Raises ValueError if the server rejects the action."""
        from websockets.exceptions import ConnectionClosed

        where = f"env.openenv.url={self._config.openenv.url}, {kind}"
        try:
            # A server without a free session sends an error and closes, perhaps before this request is sent.
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self._config.openenv.timeout_s))
        except Exception as error:  # the connection closed, it timed out, or the answer is not JSON
            raise InfrastructureError(f"{where}: {described(error)}") from error

        content = answer.get("data") or {}
        if answer.get("type") != "error":
            return content
        if kind == "step" and content.get("code") in ("VALIDATION_ERROR", "INVALID_JSON"):
            raise ValueError(content.get("message"))
        raise InfrastructureError(f"{where}: {content.get('code')}: {content.get('message')}")

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return the observation's field that the settings name, else its only field, else all as JSON."""
        shown = {name: value for name, value in observation.items() if name != "metadata"}
        only = next(iter(shown)) if len(shown) == 1 else ""
        value = shown.get(self._config.openenv.observation or only, shown)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _action_schema(config: EnvConfig) -> dict[str, Any]:
    """Read the JSON schema of an action from the server. Raises InfrastructureError if that fails."""
    url = f"{config.openenv.url.rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(url, timeout=config.openenv.timeout_s) as answer:
            return {"properties": {}, "required": []} | json.load(answer)["action"]
    except Exception as error:  # OSError, HTTP errors, or an answer that is not OpenEnv's
        raise InfrastructureError(f"{url}: {described(error)}") from error
