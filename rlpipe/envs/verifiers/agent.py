"""Represents the model in the library verifiers: as `Agents`, as the only agent and as `Interaction`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.envs.tools.episode import opening
from rlpipe.envs.verifiers.toolsets import Served, serve


class TheModel:
    """An agent of verifiers whose turns rlpipe generates.

    messages: queue of chat messages for the model. answers: queue of the model's turns; None ends the
    attempt. trace: the library's record of the attempt; has the rewards once the attempt has ended.
    """

    def __init__(self, config: EnvConfig, env: Any) -> None:
        self._config, self._env, self._served = config, env, Served()
        self.messages: asyncio.Queue[list[dict[str, str]]] = asyncio.Queue(1)
        self.answers: asyncio.Queue[str | None] = asyncio.Queue(1)
        self.trace: Any = None

    def __getattr__(self, name: str) -> TheModel:
        """Return this object for any name, because the environment chooses the name of its agent."""
        return self

    async def run(self, task: Any) -> Any:
        """Get one answer to the task's prompt; return the trace."""
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[TheModel]:
        """Set up the task, yield this object for the conversation, and score the result at the end."""
        from verifiers.v1 import AgentConfig, AgentInfo, Trace, TraceTask
        from verifiers.v1.state import state_cls

        described = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig())
        self.trace = Trace(task=described, agent=agent, state=state_cls(type(task))())

        # Pass no runtime to the hooks: `load` rejects tasks that need one.
        await task.setup(self.trace, None)
        self._served = await serve(self._env.taskset, task, self.trace.state)
        yield self
        await task.finalize(self.trace, None)
        await task.score(self.trace, None)

    async def turn(self, message: Any = None) -> Any:
        """Send a message (None: the task's prompt), run the model's tool calls, and return its answer."""
        from verifiers.v1 import Segment

        messages = self._messages(message)
        if not self.trace.nodes:
            self._add(*self._prompts(), *messages)
            messages = [node.message for node in self.trace.nodes]
        else:
            self._add(*messages)

        start = len(self.trace.nodes)
        while messages:
            await self.messages.put([{"role": one.role, "content": _text(one)} for one in messages])
            answer = await self.answers.get()
            if answer is None:
                self.trace.stop("max_turns")
                return Segment(messages=[], terminated=True)
            parser, number = self._config.tools.parser, len(self.trace.nodes)
            made, messages = await self._served.answer(answer, parser, number)
            self._add(made, sampled=True)
            self._add(*messages)
        return Segment(messages=[node.message for node in self.trace.nodes[start:]])

    def _prompts(self) -> list[Any]:
        """Return a list with one system message that joins the texts of run, tools and task; [] if none."""
        from verifiers.v1.types import SystemMessage

        system = [m["content"] for m in opening("", self._config, self._served.schemas)[:-1]]
        system += [text] if (text := self.trace.task.data.system_prompt) else []
        return [SystemMessage(content="\n\n".join(system))] if system else []

    def _messages(self, message: Any) -> list[Any]:
        """Convert a message, or the task's prompt for None, to the library's message objects."""
        from verifiers.v1.dialects.chat import parse_message
        from verifiers.v1.types import UserMessage

        message = self.trace.task.data.prompt if message is None else message
        if isinstance(message, str):
            return [UserMessage(content=message)]
        return [parse_message(one) if isinstance(one, dict) else one for one in message or []]

    def _add(self, *messages: Any, sampled: bool = False) -> None:
        from verifiers.v1 import MessageNode

        for message in messages:
            parent = len(self.trace.nodes) - 1
            node = MessageNode(message=message, parent=parent if parent >= 0 else None, sampled=sampled)
            self.trace.nodes.append(node)


def _text(message: Any) -> str:
    from verifiers.v1.types import content_text

    return content_text(message.content)
