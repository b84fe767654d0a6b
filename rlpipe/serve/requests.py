"""The common form of all dialects: messages, requests, replies, errors.

Owns the form of a message: a role, a text and tool calls. Other fields in a client's message (annotations,
refusals that are null) are not part of a conversation and are dropped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_STOPS = 16


class ApiError(Exception):
    """A request that is answered with an error. status: HTTP status. code: error code for programs."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """One request for turns of a conversation.

    messages: results of `message_of`. tools: OpenAI's schemas. n: number of alternative turns. max_tokens:
    limit of each turn (None: the run's limit). stop: texts that end a turn. top_logprobs: number of
    alternatives to return with each token. overridden: settings of the client that are ignored because the
    run sets them, such as temperature.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    overridden: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Call:
    """A tool call in a turn; arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True, kw_only=True)
class Reply:
    """One turn.

    content: text without calls. finish: "stop", "length" or "tool_calls". ids, logprobs: one for each token,
    including the stop token. texts: text of each token. top: [(text, logprob), ...] for each token.
    prompt_tokens: number of tokens before the turn. cached_tokens: how many of these were recorded before.
    """

    content: str
    calls: list[Call]
    finish: str
    ids: np.ndarray
    logprobs: np.ndarray
    texts: list[str]
    top: list[list[tuple[str, float]]]
    prompt_tokens: int
    cached_tokens: int


def message_of(given: Any, where: str = "messages") -> Message:
    """Return a chat message in the form that templates expect. Raises ApiError for anything else.

    >>> message_of({"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": None})
    {'role': 'system', 'content': 'Be brief.'}
    """
    if not isinstance(given, Mapping):
        raise ApiError(400, f"{where} must hold objects with role and content, not {type(given).__name__}.")
    role = ROLES.get(given.get("role", "")) if isinstance(given.get("role"), str) else None
    if role is None:
        raise ApiError(400, f"{where}: role={given.get('role')!r} must be one of {', '.join(ROLES)}.")

    message: Message = {"role": role, "content": text_of(given.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name) is not None:
            message[name] = string_of(given[name], f"{where}: {name}")
    calls = [_call_of(call, where) for call in list_or_empty(given, "tool_calls", f"{where}: ")]
    return message | ({"tool_calls": calls} if calls else {})


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content. Raises ApiError for images and the like."""
    if content is None:
        return ""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind not in TEXT_PARTS:
                raise ApiError(400, f"{where}: content of type {kind!r}: this model reads text only.")
        return "".join(string_of(part.get("text"), f"{where}: text") for part in content)
    return string_of(content, f"{where}: content")


def string_of(value: Any, where: str) -> str:
    """Return `value`, a text. Raises ApiError for other types, and for texts that UTF-8 cannot encode."""
    if not isinstance(value, str):
        raise ApiError(400, f"{where} must be a string, not {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{where} holds half a surrogate pair, which is not valid text.") from None
    return value


def list_of(value: Any, where: str) -> Sequence[Any]:
    """Return `value`, a list. Raises ApiError for anything else."""
    if not isinstance(value, list):
        raise ApiError(400, f"{where} must be a list, not {type(value).__name__}.")
    return value


def list_or_empty(body: Mapping[str, Any], name: str, where: str = "") -> Sequence[Any]:
    """Return a field that is a list, null or absent. Raises ApiError for anything else."""
    return [] if body.get(name) is None else list_of(body[name], f"{where}{name}")


def flag_of(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true, false, null or absent. Raises ApiError for anything else."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name}={json.dumps(value)[:50]} must be true or false.")
    return bool(value)


def count_of(body: Mapping[str, Any], *names: str, least: int, most: int) -> int | None:
    """Return the first field that is present, an integer within bounds; None if none is present.

    Raises ApiError when a field has any other value.
    """
    values = [(name, body[name]) for name in names if body.get(name) is not None]
    for name, value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ApiError(
                400, f"{name}={json.dumps(value)[:50]} must be a whole number from {least} to {most}."
            )
    return values[0][1] if values else None


def tools_of(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return OpenAI's schemas of functions. Raises ApiError for anything else."""
    tools = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(400, "tools must hold {'type': 'function', 'function': {'name': ...}}.")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ApiError(400, f"tools: parameters of {function['name']!r} must be a JSON schema.")
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": function["name"],
                    "description": str(function.get("description") or ""),
                    "parameters": dict(parameters or {"type": "object", "properties": {}}),
                },
            }
        )
    return tools


def stops_of(given: Any) -> tuple[str, ...]:
    """Return the texts that end a turn, from one text or a list. Raises ApiError for anything else."""
    stops = [] if given is None else [given] if isinstance(given, str) else list_of(given, "stop")
    if not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop must be at most {MAX_STOPS} texts that are not empty.")
    return tuple(stops)


def _call_of(given: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(
            400, f"{where}: tool_calls must hold {{'id': ..., 'function': {{'name', 'arguments'}}}}."
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model may have written anything: arguments that are not a JSON object stay text.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {
        "id": str(given.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
