"""OpenAI's chat completions: parses requests, builds answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.serve.requests import (
    ApiError,
    ChatRequest,
    Reply,
    count_of,
    flag_of,
    list_of,
    list_or_empty,
    message_of,
    stops_of,
    tools_of,
)

MAX_TOKENS = 1 << 30
MAX_ALTERNATIVES = 20
# Settings that the run determines, with the values that request nothing special.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),
}


def request_of(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request from a body. Raises ApiError."""
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise ApiError(
            400, "response_format: only text: the model samples freely, so that it can be trained."
        )
    if body.get("functions") is not None:
        raise ApiError(400, "functions are not supported: send tools.")

    tops = count_of(body, "top_logprobs", least=0, most=MAX_ALTERNATIVES) or 0
    return ChatRequest(
        messages=[message_of(message) for message in list_of(body.get("messages"), "messages")],
        tools=chosen_tools(body, tools_of(list_or_empty(body, "tools"))),
        n=count_of(body, "n", least=1, most=64) or 1,
        max_tokens=count_of(body, "max_completion_tokens", "max_tokens", least=1, most=MAX_TOKENS),
        stop=stops_of(body.get("stop")),
        top_logprobs=tops if flag_of(body, "logprobs") else 0,
        overridden=overridden(body),
    )


def chosen_tools(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that the model may call. Raises ApiError for a choice that cannot be enforced."""
    choice = body.get("tool_choice")
    kind = choice.get("type", "") if isinstance(choice, Mapping) else choice
    if kind not in ("auto", "none") and choice is not None:
        raise ApiError(400, f"tool_choice={kind!r}: the model chooses itself: send auto or none.")
    return [] if kind == "none" else tools


def overridden(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of sampling settings in a body that are ignored because the run sets them."""
    return tuple(
        name
        for name, neutral in _SAMPLING.items()
        if body.get(name) is not None and body[name] not in neutral
    )


def answer(replies: list[Reply], body: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    """Return the answer to a request. name: id of the answer."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": _content(reply)} | _calls(reply),
            "logprobs": _logprobs(reply) if body.get("logprobs") else None,
            "finish_reason": reply.finish,
        }
        for index, reply in enumerate(replies)
    ]
    return _head(body, name, created) | {
        "object": "chat.completion",
        "choices": choices,
        "usage": usage(replies),
    }


def events(
    replies: list[Reply], body: Mapping[str, Any], name: str, created: int
) -> Iterator[tuple[str, Any]]:
    """Yield the chunks of a streamed answer as (event name, data); the names are empty."""
    head = _head(body, name, created) | {"object": "chat.completion.chunk"}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Any:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return "", head | {"choices": [choice]}

    for index, reply in enumerate(replies):
        yield chunk(index, {"role": "assistant", "content": ""})
        logprobs = _logprobs(reply) if body.get("logprobs") else None
        if reply.content or logprobs:
            yield chunk(index, {"content": reply.content}, logprobs=logprobs)
        for number, call in enumerate(_calls(reply).get("tool_calls", [])):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, reply.finish)

    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield "", head | {"choices": [], "usage": usage(replies)}
    yield "", "[DONE]"


def error(failure: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    return {"error": {"message": str(failure), "type": kind, "param": None, "code": failure.code}}


def usage(replies: list[Reply]) -> dict[str, Any]:
    """Return the token counts of an answer; the prompt counts once."""
    prompt, completion = replies[0].prompt_tokens, sum(len(reply.ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


def _head(body: Mapping[str, Any], name: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "created": created, "model": str(body.get("model") or "policy")}


def _content(reply: Reply) -> str | None:
    return reply.content if reply.content or not reply.calls else None


def _calls(reply: Reply) -> dict[str, Any]:
    if not reply.calls:
        return {}
    return {
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
    }


def _logprobs(reply: Reply) -> dict[str, Any]:
    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": float(logprob), "bytes": list(text.encode())}

    rows = zip(reply.texts, reply.logprobs, reply.top, strict=True)
    content = [
        entry(text, logprob) | {"top_logprobs": [entry(*each) for each in top]} for text, logprob, top in rows
    ]
    return {"content": content, "refusal": None}
