"""The interface between the collector and an endpoint through which agents talk to the model.

`rlpipe.serve` implements it: the collector hands over an attempt, the agent talks to the endpoint, and the
collector gets the conversations back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rlpipe.envs.base import AgentAddress
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.turn import Turn
from rlpipe.types import GenerateResult, Trajectory


@dataclass(slots=True, kw_only=True)
class AgentAttempt:
    """One attempt of an agent, as served by an endpoint.

    trajectory: empty; gets the conversations. session_id: of the attempt; each conversation has one derived
    from it. generate: generates a turn, and continues those that an abort cut off. end_session: frees what
    the engine caches for a conversation. max_turns: of all conversations together. max_context: tokens of
    one. max_new_tokens: of a turn. top_logprobs: recorded with each token.
    """

    trajectory: Trajectory
    session_id: str
    chat: ChatFormat
    generate: Callable[[Turn], Awaitable[GenerateResult]]
    end_session: Callable[[str], None]
    max_turns: int
    max_context: int
    max_new_tokens: int
    top_logprobs: int = 0


class AgentSession(Protocol):
    """An attempt while it is served.

    limit: "max_turns" or "context" once a request was refused for it, else "". cut: some turn used up its
    tokens. failure: what the engine failed with; every later request is refused. texts: of the turns, in
    order.
    """

    address: AgentAddress
    limit: str
    cut: bool
    failure: BaseException | None
    texts: list[str]

    async def close(self) -> None:
        """Refuse further requests, end those that run, and write everything recorded to the trajectory."""


class AgentEndpoint(Protocol):
    """Serves attempts of agents."""

    async def open(self, attempt: AgentAttempt) -> AgentSession:
        """Serve an attempt from here on."""
        ...

    async def close(self) -> None:
        """Stop serving."""
