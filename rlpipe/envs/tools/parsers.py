"""Reads tool calls from a turn's text, strictly: a nearly correct call is an error, never an answer.

    hermes     <tool_call>{"name": "read", "arguments": {"document": "store"}}</tool_call>, one tag per call
               (Hermes, Qwen2.5, Qwen3)
    json       the full turn is one such JSON object; the key "parameters" also means "arguments" (Llama 3.1)
    pythonic   the full turn is [read(document="store")], with literal arguments only (Llama 3.2 and 4)

Owns the formats only; `schema.call_tool` checks the names and arguments of tools.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlpipe.config.env import ToolParser
from rlpipe.envs.tools.schema import ToolCall

LONGEST_TURN = 20_000  # maximum number of characters; longer turns are not parsed
LONGEST_NUMBER = 1000  # maximum number of characters; Python cannot print integers of more than 4,300 digits
_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAGS = ("<tool_call>", "</tool_call>")


class MalformedCall(ValueError):
    """Raised if a turn contains a tool call in a wrong format; the model reads the message."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ParsedTurn:
    """A parsed turn. calls: calls in order; empty if the turn is an answer. content: text outside calls."""

    calls: tuple[ToolCall, ...]
    content: str


def parse_turn(text: str, parser: ToolParser) -> ParsedTurn:
    """Parse the calls and the content of a turn. Raises MalformedCall for a call in a wrong format.

    >>> parse_turn('<tool_call>{"name": "read", "arguments": {}}</tool_call>', ToolParser.HERMES).calls
    (ToolCall(name='read', arguments={}),)
    >>> parse_turn("42", ToolParser.HERMES)
    ParsedTurn(calls=(), content='42')
    """
    if len(text) > LONGEST_TURN:
        raise MalformedCall(f"the turn has {len(text)} characters, at most {LONGEST_TURN} are read")
    return _PARSERS[parser](text)


def _hermes(text: str) -> ParsedTurn:
    calls = tuple(_object(_load(body), ("arguments",)) for body in _HERMES.findall(text))
    content = _HERMES.sub("", text).strip()

    # A remaining tag has no matching opening or closing tag.
    if any(tag in content for tag in _TAGS):
        raise MalformedCall("every <tool_call> needs its </tool_call>")
    return ParsedTurn(calls=calls, content=content)


def _json(text: str) -> ParsedTurn:
    text = text.strip()
    if not text.startswith("{"):
        return ParsedTurn(calls=(), content=text)
    return ParsedTurn(calls=(_object(_load(text), ("arguments", "parameters")),), content="")


def _pythonic(text: str) -> ParsedTurn:
    """Parse a turn such as [read(document="store")]. Raises MalformedCall for a call in a wrong format."""
    text = text.strip()
    if not text.startswith("["):
        return ParsedTurn(calls=(), content=text)
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise MalformedCall("expected [tool(argument=value, ...)]")

        # The syntax tree does not show how a number was written, so check the tokens.
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NUMBER and (len(token.string) > LONGEST_NUMBER or "_" in token.string):
                raise MalformedCall(f"not a number: {token.string:.40}")

        return ParsedTurn(calls=tuple(_python_call(node) for node in tree.elts), content="")
    except (SyntaxError, tokenize.TokenError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, MalformedCall):
            raise
        raise MalformedCall(f"not a list of calls: {error!s:.100}") from error


def _python_call(node: ast.expr) -> ToolCall:
    """Convert a node of the syntax tree to a call. Raises MalformedCall if it is not a valid call."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise MalformedCall("expected tool(argument=value, ...) with named arguments")

    names = [keyword.arg for keyword in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise MalformedCall("every argument must be named once")

    return ToolCall(
        name=node.func.id, arguments={k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
    )


def strict_json(text: str | bytes, **options: Any) -> Any:
    """Parse standard JSON: no NaN and no number outside the range of a float. options: see `json.loads`.

    Raises ValueError for invalid JSON, and RecursionError if it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, **options)


def _load(body: str) -> Any:
    """Parse a call's JSON. Raises MalformedCall if it is invalid or repeats a key."""
    try:
        return strict_json(body, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise MalformedCall(f"not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise MalformedCall("not JSON: nested too deeply") from error
    except ValueError as error:
        raise MalformedCall(f"not JSON: {error!s:.100}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key is there twice")
    return record


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(f"{digits:.40}")


def _object(record: Any, keys: tuple[str, ...]) -> ToolCall:
    """Convert a JSON object to a call. Raises MalformedCall if it has another form.

    keys: keys that may hold the arguments.
    """
    present = [key for key in keys if isinstance(record, dict) and key in record]
    if len(present) != 1 or record.keys() != {"name", present[0]}:
        raise MalformedCall('expected {"name": ..., "arguments": {...}} and nothing else')

    name, arguments = record["name"], record[present[0]]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedCall('"name" must be text and "arguments" an object')
    return ToolCall(name=name, arguments=arguments)


_PARSERS: dict[ToolParser, Callable[[str], ParsedTurn]] = {
    ToolParser.HERMES: _hermes,
    ToolParser.JSON: _json,
    ToolParser.PYTHONIC: _pythonic,
}

INSTRUCTIONS = {
    ToolParser.HERMES: 'write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>',
    ToolParser.JSON: 'write one JSON object and nothing else: {"name": NAME, "arguments": {...}}',
    ToolParser.PYTHONIC: "write a list of calls and nothing else: [NAME(ARGUMENT=VALUE)]",
}
