"""Tools: each has a name, a JSON schema of its arguments in OpenAI's format, and a function.

Owns the check of a call before the function runs. An invalid or rejected call raises a `ToolError`, whose
message the model reads; it never ends the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator


class ToolError(ValueError):
    """Raised if a tool call has no result; the model reads the message."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolCall:
    """A call that the model wrote. arguments: values by name, not yet checked."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class Tool:
    """One tool.

    parameters: JSON schema of the arguments, an object. function: takes keyword arguments and returns text;
        may raise ToolError.

    >>> echo = text_tool("echo", "Repeat.", {"text": "what to repeat"}, lambda text: text)
    >>> echo.schema()["function"]["parameters"]["required"]
    ['text']
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., str]

    def schema(self) -> dict[str, Any]:
        """Return the schema in the format of OpenAI's chat API and of chat templates."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


def text_tool(name: str, description: str, arguments: dict[str, str], function: Callable[..., str]) -> Tool:
    """Make a tool whose arguments are required texts. arguments: description of each argument, by name."""
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {key: {"type": "string", "description": text} for key, text in arguments.items()},
            "required": list(arguments),
            "additionalProperties": False,
        },
        function=function,
    )


def call_tool(tools: Sequence[Tool], call: ToolCall) -> str:
    """Check a call and return its result.

    Raises ToolError for an unknown tool, for arguments that do not fit the schema, or if the tool raises it.

    >>> echo = text_tool("echo", "Repeat.", {"text": "what to repeat"}, lambda text: text)
    >>> call_tool([echo], ToolCall(name="echo", arguments={"text": "hi"}))
    'hi'
    >>> call_tool([echo], ToolCall(name="echo", arguments={"text": 3}))
    Traceback (most recent call last):
    rlpipe.envs.tools.schema.ToolError: echo: 3 is not of type 'string'
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        raise ToolError(f"no tool {call.name!r:.60}; there are {', '.join(t.name for t in tools)}")

    # Report only the first error; it is enough for the model to correct the call.
    for error in Draft202012Validator(tool.parameters).iter_errors(call.arguments):
        raise ToolError(f"{tool.name}: {error.message:.200}")

    return tool.function(**call.arguments)
