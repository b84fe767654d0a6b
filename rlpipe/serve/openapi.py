"""The OpenAPI document of the endpoint: the requests that it answers, and the content of each answer.

Served at /openapi.json. Owns only the description: `requests` and the dialects parse bodies and build
answers. Fields that are not named here are ignored. A test with Schemathesis checks that a request that
violates its schema gets status 400, and that every answer matches its schema.
"""

from __future__ import annotations

from typing import Any

from rlpipe.serve.chat import MAX_ALTERNATIVES, MAX_TOKENS
from rlpipe.serve.requests import MAX_STOPS, ROLES, TEXT_PARTS

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_ANY_OBJECT: Schema = {"type": "object"}
_OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
_NULL: Schema = {"type": "null"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_UNSET: Schema = {"enum": [None, False]}
_CHOICE = ["auto", "none"]
_RETRY = {
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests of this attempt run.",
    503: "The engine failed: the attempt will be repeated.",
}
_REFUSED = {
    400: "The body is malformed, the template refuses the conversation, or a limit is reached.",
    401: "The key is of no attempt that runs.",
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }


def _list(items: Schema, *, least: int = 0, null: bool = False) -> Schema:
    return {"type": ["array", "null"] if null else "array", "items": items, "minItems": least}


def _number(least: int, most: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _only_text() -> Schema:
    """Schema of the only answer format that does not constrain sampling."""
    return _either(_NULL, _object({"type": _one_of("text")}))


def _named_function() -> dict[str, Schema]:
    return {"name": _TEXT}


def _requests() -> dict[str, Schema]:
    part = _object({"type": _one_of(*TEXT_PARTS), "text": _TEXT})
    role = _one_of(*ROLES)
    names = {"name": _TEXT_OR_NULL, "tool_call_id": _TEXT_OR_NULL, "reasoning_content": _TEXT_OR_NULL}
    calls = {"tool_calls": _list(_object({"function": _object(_named_function())}), null=True)}
    message = _object({"role": role}, {"content": _ref("Content")} | names | calls)
    declared = {"parameters": _OBJECT_OR_NULL}
    texts = _list(_TEXT | {"minLength": 1}) | {"maxItems": MAX_STOPS}
    choice = _either(_one_of(*_CHOICE, None), _object({"type": _one_of(*_CHOICE)}))
    ids = _list({"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1})

    block = _either(
        part,
        _object({"type": _one_of("tool_use")} | _named_function()),
        _object({"type": _one_of("tool_result")}, {"content": _ref("Content")}),
    )
    item = _either(
        message | {"properties": message["properties"] | {"type": _one_of("message")}},
        _object({"type": _one_of("function_call")} | _named_function()),
        _object(
            {"type": _one_of("function_call_output")},
            {"output": _ref("Content"), "call_id": _TEXT_OR_NULL},
        ),
    )
    return {
        "Content": _either(_TEXT, _NULL, _list(part)),
        "Message": message,
        "Stop": _either(_TEXT | {"minLength": 1}, _NULL, texts),
        "ToolChoice": choice,
        "ChatRequest": _object(
            {"messages": _list(_ref("Message"), least=1)},
            {
                "tools": _list(_object({"function": _object(_named_function(), declared)}), null=True),
                "tool_choice": _ref("ToolChoice"),
                "n": _number(1, 64),
                "max_tokens": _number(1, MAX_TOKENS),
                "max_completion_tokens": _number(1, MAX_TOKENS),
                "stop": _ref("Stop"),
                "logprobs": _FLAG,
                "top_logprobs": _number(0, MAX_ALTERNATIVES),
                "stream": _FLAG,
                "response_format": _only_text(),
                "functions": _NULL,
            },
        ),
        "ResponsesRequest": _object(
            {"input": _either(_TEXT, _list(item, least=1))},
            {
                "instructions": _ref("Content"),
                "tools": _list(
                    _object({"type": _one_of("function")} | _named_function(), declared), null=True
                ),
                "tool_choice": _ref("ToolChoice"),
                "max_output_tokens": _number(1, MAX_TOKENS),
                "stream": _FLAG,
                "text": _either(_NULL, _object({}, {"format": _only_text()})),
            }
            | dict.fromkeys(("previous_response_id", "conversation", "prompt", "background"), _UNSET),
        ),
        "MessagesRequest": _object(
            {
                "max_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
                "messages": _list(
                    _object({"role": role}, {"content": _either(_TEXT, _NULL, _list(block))}), least=1
                ),
            },
            {
                "system": _ref("Content"),
                "tools": _list(_object(_named_function() | {"input_schema": _ANY_OBJECT}), null=True),
                "tool_choice": _ref("ToolChoice"),
                "stop_sequences": _ref("Stop"),
                "stream": _FLAG,
            },
        ),
        "GenerateRequest": _object(
            {"token_ids": ids | {"minItems": 1}},
            {
                "sampling_params": _object(
                    {},
                    {
                        "n": _number(1, 1),
                        "max_tokens": _number(1, MAX_TOKENS),
                        "stop_token_ids": ids | {"type": ["array", "null"]},
                    },
                )
                | {"type": ["object", "null"]},
                "features": _one_of(None, []),
                "content_parts": _one_of(None, []),
            },
        ),
    }


def _answers() -> dict[str, Schema]:
    number = {"type": "number"}
    scored = {"token": _TEXT, "logprob": number, "bytes": {"type": ["array", "null"], "items": _COUNT}}
    logprobs = _object({"content": _list(_object(scored | {"top_logprobs": _list(_object(scored))}))})
    called = {"name": _TEXT, "arguments": _TEXT}
    call = _object({"id": _TEXT, "type": _one_of("function"), "function": _object(called)})
    finish = _one_of("stop", "length", "tool_calls")
    choice = _object(
        {
            "index": _COUNT,
            "message": _object(
                {"role": _one_of("assistant"), "content": _TEXT_OR_NULL}, {"tool_calls": _list(call)}
            ),
            "logprobs": _either(_NULL, logprobs),
            "finish_reason": finish,
        }
    )
    written = _object({"type": _one_of("output_text"), "text": _TEXT})
    output = _either(
        _object({"type": _one_of("message"), "id": _TEXT, "content": _list(written), "status": _TEXT}),
        _object({"type": _one_of("function_call"), "call_id": _TEXT, "status": _TEXT} | called),
    )
    block = _either(
        _object({"type": _one_of("text"), "text": _TEXT}),
        _object({"type": _one_of("tool_use"), "id": _TEXT, "name": _TEXT, "input": _ANY_OBJECT}),
    )
    generated = {"index": _COUNT, "token_ids": _list(_COUNT), "logprobs": logprobs, "finish_reason": finish}
    return {
        "Chat": _object(
            {
                "id": _TEXT,
                "object": _one_of("chat.completion"),
                "created": _COUNT,
                "model": _TEXT,
                "choices": _list(choice, least=1),
                "usage": _object(
                    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}
                ),
            }
        ),
        "Response": _object(
            {
                "id": _TEXT,
                "object": _one_of("response"),
                "created_at": _COUNT,
                "status": _one_of("completed", "incomplete"),
                "model": _TEXT,
                "output": _list(output, least=1),
                "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
            }
        ),
        "MessageAnswer": _object(
            {
                "id": _TEXT,
                "type": _one_of("message"),
                "role": _one_of("assistant"),
                "model": _TEXT,
                "content": _list(block, least=1),
                "stop_reason": _one_of("end_turn", "max_tokens", "tool_use"),
                "usage": _object(
                    {"input_tokens": _COUNT, "cache_read_input_tokens": _COUNT, "output_tokens": _COUNT}
                ),
            }
        ),
        "Generated": _object(
            {"request_id": _TEXT, "choices": _list(_object(generated), least=1) | {"maxItems": 1}}
        ),
        "Models": _object(
            {
                "object": _one_of("list"),
                "data": _list(_object({"id": _one_of("policy"), "max_model_len": _COUNT}), least=1),
            }
        ),
        "Health": _object({"status": _one_of("ok")}),
        "Error": _object({"error": _object({"message": _TEXT, "type": _TEXT})}),
    }


def document() -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1."""
    posts = {
        "/v1/chat/completions": ("Chat completions of OpenAI.", "ChatRequest", "Chat"),
        "/v1/responses": ("Responses of OpenAI; nothing is stored.", "ResponsesRequest", "Response"),
        "/v1/messages": ("Messages of Anthropic.", "MessagesRequest", "MessageAnswer"),
        "/inference/v1/generate": ("Tokens in, tokens out.", "GenerateRequest", "Generated"),
    }
    paths: dict[str, Any] = {
        path: {"post": _operation(title, answer, request=request)}
        for path, (title, request, answer) in posts.items()
    }
    paths["/v1/models"] = {"get": _operation("The model of this run.", "Models")}
    paths["/health"] = {
        "get": _operation("Whether the endpoint listens.", "Health", open_to_all=True),
        "servers": [{"url": "/"}],
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rlpipe's endpoint for agents",
            "version": "1",
            "description": "Sampling settings are the run's: those of a request are ignored, and named in "
            "the header x-rlpipe-overridden. A streamed turn arrives as a whole.",
        },
        "servers": [
            {"url": "/"},
            {"url": "/session/{key}", "variables": {"key": {"default": "KEY"}}},
        ],
        "security": [{"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _requests() | _answers(),
        },
    }


def _operation(title: str, answer: str, *, request: str = "", open_to_all: bool = False) -> dict[str, Any]:
    """Describe an operation by the names of its schemas. request: schema of the body; empty for a GET."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if request and request != "GenerateRequest":
        # Schema of each event. The data are JSON or, at the end of chat completions, "[DONE]".
        content["text/event-stream"] = {"schema": _object({"data": _TEXT}, {"event": _TEXT})}
    statuses = {} if open_to_all else _REFUSED | _RETRY if request else {401: _REFUSED[401]}
    failed = {"content": {"application/json": {"schema": _ref("Error")}}}
    operation: dict[str, Any] = {
        "summary": title,
        "responses": {"200": {"description": "The answer.", "content": content}}
        | {str(status): failed | {"description": text} for status, text in statuses.items()},
    }
    if request:
        body = {"application/json": {"schema": _ref(request)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation | ({"security": []} if open_to_all else {})
