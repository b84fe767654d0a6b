"""Anthropic's messages: parses requests, builds answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.serve.chat import MAX_TOKENS, chosen_tools, overridden
from rlpipe.serve.requests import (
    ApiError,
    ChatRequest,
    Message,
    Reply,
    count_of,
    list_of,
    list_or_empty,
    message_of,
    stops_of,
    text_of,
    tools_of,
)

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def request_of(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request from a body. Raises ApiError."""
    messages: list[Message] = []
    if system := text_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})

    given = list_of(body.get("messages"), "messages")
    if not given:
        raise ApiError(400, "messages is empty: send one message or more.")
    for message in given:
        messages += _messages_of(message)

    max_tokens = count_of(body, "max_tokens", least=1, most=MAX_TOKENS)
    if max_tokens is None:
        raise ApiError(400, "max_tokens is missing: set the maximum number of tokens of an answer.")

    tools = tools_of([{"function": _function(tool)} for tool in list_or_empty(body, "tools")])
    return ChatRequest(
        messages=messages,
        tools=chosen_tools(body, tools),
        max_tokens=max_tokens,
        stop=stops_of(body.get("stop_sequences")),
        overridden=overridden(body),
    )


def answer(replies: list[Reply], body: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    """Return the answer to a request."""
    (reply,) = replies
    return _head(reply, body, name) | {
        "content": _blocks(reply),
        "stop_reason": _STOPS[reply.finish],
        "usage": _usage(reply),
    }


def events(
    replies: list[Reply], body: Mapping[str, Any], name: str, created: int
) -> Iterator[tuple[str, Any]]:
    """Yield the events of a streamed answer as (event name, data)."""

    def named(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    (reply,) = replies
    empty = _usage(reply) | {"output_tokens": 0}
    yield named("message_start", message=_head(reply, body, name) | {"content": [], "usage": empty})

    # A turn is sent only when it is complete, so each block has one delta.
    for index, block in enumerate(_blocks(reply)):
        if block["type"] == "text":
            start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield named("content_block_start", index=index, content_block=start)
        yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)

    ended = {"stop_reason": _STOPS[reply.finish], "stop_sequence": None}
    yield named("message_delta", delta=ended, usage=_usage(reply))
    yield named("message_stop")


def error(failure: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _ERRORS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(failure)}}


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping):
        raise ApiError(400, "tools must hold {'name': ..., 'input_schema': {...}}: the server runs no tools.")
    return {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
    }


def _messages_of(given: Any) -> list[Message]:
    """Return the chat messages for one message; each tool result becomes a separate message."""
    if not isinstance(given, Mapping):
        return [message_of(given)]
    role, content = given.get("role"), given.get("content")
    if not isinstance(content, list):
        return [message_of({"role": role, "content": content})]

    texts, calls, results = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "content": block.get("content")}
            results.append(message_of(result | {"tool_call_id": str(block.get("tool_use_id") or "")}))
        else:
            texts.append(block)

    message = message_of({"role": role, "content": texts, "tool_calls": calls})
    return results if results and not texts and not calls else [*results, message]


def _head(reply: Reply, body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields that a message has before its content is known."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or "policy"),
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": reply.content}] if reply.content or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return [*text, *calls]


def _usage(reply: Reply) -> dict[str, int]:
    cached = reply.cached_tokens
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(reply.ids),
    }
