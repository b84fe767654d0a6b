"""Serves the tools of a task in this process, and runs the tool calls in a turn of the model."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.env import ToolParser
from rlpipe.envs.tools import schema as tools
from rlpipe.envs.tools.parsers import MalformedCall, parse_turn


@dataclass(slots=True, kw_only=True)
class Served:
    """The tools of an episode.

    schemas: OpenAI schemas. servers: (server, name on that server) for each tool name that the model sees.
    """

    schemas: list[dict[str, Any]] = field(default_factory=list)
    servers: dict[str, tuple[Any, str]] = field(default_factory=dict)

    async def answer(self, text: str, parser: ToolParser, number: int) -> tuple[Any, list[Any]]:
        """Run the calls in a turn; return the turn as the library's message, and the results as messages.

        number: index of the turn's message, which makes the ids of its calls unique.
        """
        from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

        try:
            parsed = parse_turn(text, parser) if self.servers else None
        except MalformedCall as error:
            return AssistantMessage(content=text), [
                ToolMessage(tool_call_id="none", content=f"error: {error}")
            ]
        if parsed is None or not parsed.calls:
            return AssistantMessage(content=text), []

        made, results = [], []
        for index, call in enumerate(parsed.calls):
            name = f"call_{number}_{index}"
            made.append(ToolCall(id=name, name=call.name, arguments=json.dumps(call.arguments)))
            results.append(ToolMessage(tool_call_id=name, content=await self.call(call), name=call.name))
        return AssistantMessage(content=parsed.content, tool_calls=made), results

    async def call(self, call: tools.ToolCall) -> str:
        """Run a call; return the tool's result or the error as text for the model."""
        if call.name not in self.servers:
            return f"error: no tool {call.name!r}; there are {', '.join(self.servers) or 'none'}"
        server, name = self.servers[call.name]
        try:
            result = await server.call_tool(name, call.arguments)
        except Exception as error:  # wrong arguments or an error of the tool; the model reads it
            return f"error: {error}"
        return "\n".join(getattr(part, "text", "") for part in result.content)


async def serve(taskset: Any, task: Any, state: Any = None) -> Served:
    """Start the tools of a task, which share the state of its trace."""
    from mcp.server.mcpserver import MCPServer

    served = Served()
    for toolset in (*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)):

        async def pull() -> Any:
            return state

        async def push(before: bytes) -> None:
            """Do nothing: the tools change the state object directly."""

        # The library sends the state to a server in another process. Here, the tools run in this process.
        toolset._pull_state, toolset._push_state = pull, push
        if state is not None:
            await toolset.setup()
            await toolset.setup_task(task.data)

        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            served.servers[name] = server, tool.name
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            served.schemas.append({"type": "function", "function": function})
    return served


def schemas_of(taskset: Any, task: Any) -> list[dict[str, Any]]:
    """Return the schemas of the tools; may be called from any thread, with or without an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, serve(taskset, task)).result().schemas
