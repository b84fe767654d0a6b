"""The interface between the collector and an endpoint where agents send requests to the model.

`rlpipe.serve` implements it. The collector opens an attempt, the agent sends requests to the endpoint, and
the collector gets the conversations.
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
    """One attempt of an agent, which an endpoint serves.

    trajectory: empty; the conversations are added to it. session_id: id of the attempt, from which each
    conversation's id is derived. generate: generates a turn, and continues it after an abort. end_session:
    frees the engine's cache for a conversation. max_turns: limit over all conversations. max_context: limit
    of a conversation in tokens. max_new_tokens: limit of a turn. top_logprobs: how many to record with each
    token.
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
    """An attempt that is being served.

    limit: "max_turns" or "context" once a request was refused because of this limit, else "". cut: whether a
    turn used up its tokens. failure: the engine's exception, if any; every later request is refused. texts:
    texts of the turns, in the order of generation. turns: after `close`, the messages of the trajectory's
    conversations, {"role", "text"}, and the turns among them, {"action"}, in the order of its tokens.
    """

    address: AgentAddress
    limit: str
    cut: bool
    failure: BaseException | None
    texts: list[str]
    turns: list[dict[str, str]]

    async def close(self) -> None:
        """Refuse further requests, end running ones, and write all recorded data to the trajectory."""


class AgentEndpoint(Protocol):
    """Serves attempts of agents."""

    async def open(self, attempt: AgentAttempt) -> AgentSession:
        """Start to serve an attempt."""
        ...

    async def close(self) -> None:
        """Stop serving."""
