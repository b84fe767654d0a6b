"""OpenAI's responses without stored state: parses requests, builds answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.serve import chat
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
    text_of,
    tools_of,
)

error = chat.error
_STATE = ("previous_response_id", "conversation", "prompt", "background")


def request_of(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request from a body. Raises ApiError."""
    if kept := [name for name in _STATE if body.get(name) is not None and body[name] is not False]:
        raise ApiError(400, f"{kept[0]} is not supported: send the whole conversation as input.")

    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else text
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise ApiError(400, "text.format: only text: the model samples freely, so that it can be trained.")

    messages: list[Message] = []
    if instructions := text_of(body.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})

    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
    if not items:
        raise ApiError(400, "input is empty: send one item or more.")
    for item in items:
        _add(messages, item)

    tools = []
    for tool in list_or_empty(body, "tools"):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise ApiError(400, "tools must be functions: the server runs no tools.")
        tools.append({"function": tool})

    return ChatRequest(
        messages=messages,
        tools=chosen_tools(body, tools_of(tools)),
        max_tokens=count_of(body, "max_output_tokens", least=1, most=MAX_TOKENS),
        overridden=overridden(body),
    )


def answer(replies: list[Reply], body: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    """Return the answer to a request."""
    (reply,) = replies
    return _response(reply, body, name, created) | {"output": _items(reply, name)}


def events(
    replies: list[Reply], body: Mapping[str, Any], name: str, created: int
) -> Iterator[tuple[str, Any]]:
    """Yield the events of a streamed answer as (event name, data)."""
    (reply,) = replies
    for number, (kind, fields) in enumerate(_events(reply, body, name, created)):
        yield kind, {"type": kind, "sequence_number": number, **fields}


def _events(
    reply: Reply, body: Mapping[str, Any], name: str, created: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an answer; each item has a start, one delta, and an end."""
    done = _response(reply, body, name, created)
    started = done | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": started}

    items = _items(reply, name)
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        opened = item | {"status": "in_progress"} | empty
        yield "response.output_item.added", {"output_index": index, "item": opened}

        if item["type"] == "message":
            (part,) = item["content"]
            within = at | {"content_index": 0}
            yield "response.content_part.added", within | {"part": part | {"text": ""}}
            yield "response.output_text.delta", within | {"delta": part["text"], "logprobs": []}
            yield "response.output_text.done", within | {"text": part["text"], "logprobs": []}
            yield "response.content_part.done", within | {"part": part}
        else:
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", at | {"delta": arguments}
            yield "response.function_call_arguments.done", at | {"arguments": arguments, "name": item["name"]}

        yield "response.output_item.done", {"output_index": index, "item": item}

    yield f"response.{done['status']}", {"response": done | {"output": items}}


def _add(messages: list[Message], item: Any) -> None:
    """Add an input item to the messages; calls join the assistant's message before. Raises ApiError."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        message = message_of({"role": "assistant", "content": "", "tool_calls": [call]}, "input")
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    elif kind == "function_call_output":
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append(message_of(output, "input"))
    elif kind == "message":
        messages.append(message_of(item, "input"))
    else:
        raise ApiError(400, f"input: items of type {kind!r} are not supported.")


def _items(reply: Reply, name: str) -> list[dict[str, Any]]:
    """Return the items of an answer: its text, if any, then its calls."""
    items: list[dict[str, Any]] = []
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{name}_{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for number, call in enumerate(reply.calls)
    ]

    status = "incomplete" if reply.finish == "length" else "completed"
    return [item | {"status": status} for item in items]


def _response(reply: Reply, body: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    """Return the response object without its output."""
    cut = reply.finish == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": str(body.get("model") or "policy"),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": len(reply.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + len(reply.ids),
        },
    }
