"""The environment Protocol: a suite lists instances, an episode is one attempt at one of them.

Owns the contract between collector and environments. An `Episode` is one attempt at one instance;
its methods may block (they run a sandbox), so the collector calls them in threads; `async def` methods are
awaited in an event loop that has its own thread (`envs.user_loop`). Infrastructure failures raise
`InfrastructureError`; they are never a reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import socket
from typing import Any, Protocol, runtime_checkable

TRAIN = "train"  # the split that runs train on


class InfrastructureError(RuntimeError):
    """The environment, not the model, failed: the trajectory is retried, then masked."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Outcome of one action.

    observation: what the model reads next (empty when done): a text, or chat messages with the roles user,
        tool or system.
    done: the episode is over, and `reward` is set.
    reward: of this step; the reward of a trajectory is the sum over its steps. None counts as 0 while the
        episode is not done.
    truncated: ended by a limit of the environment, not by the model. The episode is over; it is counted
        (env/truncated) and trained on like any other.
    info: metadata to record in the trajectory.
    """

    observation: str | Sequence[Mapping[str, Any]] = ""
    done: bool = False
    reward: float | None = None
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GroupMember:
    """One finished attempt, for `score_group`.

    text: of the last turn. turns: texts of all turns. reward: sum over its steps. info: as recorded; what
    `score_group` adds to it is recorded too.
    """

    text: str
    turns: list[str]
    reward: float
    info: dict[str, Any]


# What `step` returns: a number is the reward and ends the episode, a text is the next observation.
Step = StepResult | float | str
Opening = list[dict[str, str]] | StepResult


class Episode(Protocol):
    """One attempt. Each method may be `async def`; an ordinary method may block.

    Two methods are optional. `finish()` is called when turns or context are used up; it returns a
    `StepResult` that is done, or a reward (without it, the episode ends with the rewards of its steps).
    `close()` is called at the end to free resources.
    """

    def messages(self) -> Opening | Awaitable[Opening]:
        """Return the opening chat messages, [{'role': ..., 'content': ...}, ...].

        Only a seat of a `Game` may return a `StepResult`, if the game is over before its first turn."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Act on the text that the model wrote this turn.

        A turn that `rollout.max_new_tokens` cut off is passed in too, with the text up to there.
        Raises InfrastructureError when something other than the model failed."""
        ...


@runtime_checkable
class Game(Protocol):
    """An attempt with several players, all played by the policy; each has a trajectory and a reward.

    A suite that returns a `Game` gives the number of players by `players(instance_id)`, see `Suite`.
    `envs.seats` makes the seats of a game in which players take turns. `close()` is optional, as for an
    `Episode`.
    """

    @property
    def seats(self) -> Sequence[Episode]:
        """Return an episode for each player. All run at once, their `async def` methods in one thread."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentAddress:
    """Where an agent reaches the model for one attempt.

    root_url: of the endpoint, such as http://127.0.0.1:40123. api_key: valid for this attempt only.
    answer_at: makes the endpoint also answer at a listening socket, such as one in the network of a sandbox,
    until the attempt ends; may be called from any event loop.
    """

    root_url: str
    api_key: str
    answer_at: Callable[[socket], Awaitable[None]]


@runtime_checkable
class AgentEpisode(Protocol):
    """An attempt in which a program calls the model itself, rather than turn by turn through `step`.

    Any suite may return one, including a user's suite.
    """

    def run_agent(self, address: AgentAddress) -> str | Awaitable[str | None] | None:
        """Work on the task until it is done; return the answer, or None for the text of the last turn.

        Raises InfrastructureError when something other than the model failed."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Grade the answer; this ends the episode."""
        ...


class Suite(Protocol):
    """A set of instances by split. Splits: 'train' and any number of held-out sets.

    Optional members: `tools`, an attribute with OpenAI schemas of the tools that the chat template shows.
    `score_group(instance_id, results)` is called once with the finished attempts at an instance, a list of
    `GroupMember`, and returns their final rewards in order. `train_stages()` makes a curriculum: it returns
    the training instances as several lists, which every epoch goes through in order. `players(instance_id)`
    returns how many attempts take part in one `Game` at an instance (1 without it).
    """

    max_turns: int

    def splits(self) -> Sequence[str]:
        """Return the names of the held-out sets, the primary one first."""
        ...

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order."""
        ...

    def episode(self, instance_id: str) -> Episode | AgentEpisode | Game:
        """Start a fresh attempt at an instance.

        A suite whose method has these parameters also gets `seed`, an integer that differs for each attempt
        and is reproducible from the run's seed, and `attempt`, the number of the attempt in its group, from
        0.
        """
        ...


def train_stages(suite: Suite) -> Sequence[Sequence[str]]:
    """Return the training instances by stage of the suite's curriculum; one stage without a curriculum."""
    stages = getattr(suite, "train_stages", None)
    return [suite.instance_ids(TRAIN)] if stages is None else stages()


def num_players(suite: Suite, instance_id: str) -> int:
    """Return how many attempts at an instance take part in one game."""
    players = getattr(suite, "players", None)
    return 1 if players is None else players(instance_id)


def seats_of(episode: Any) -> Sequence[Any]:
    """Return the episodes of a game, or the only one."""
    return getattr(episode, "seats", [episode])


def start_episode(suite: Suite, instance_id: str, *, seed: int, attempt: int) -> Any:
    """Start an attempt, with seed and attempt if `suite.episode` has such parameters."""
    return suite.episode(instance_id, **named_by(suite.episode, seed=seed, attempt=attempt))


def finish_episode(episode: Episode) -> Any:
    """Call `finish` of an episode; one without it adds no reward."""
    finish = getattr(episode, "finish", None)
    return StepResult(done=True, reward=0.0) if finish is None else finish()


def close_episode(episode: Episode | Game) -> Any:
    """Call `close` of an episode, if it has one."""
    close = getattr(episode, "close", None)
    return None if close is None else close()


def named_by(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that a function has parameters for.

    >>> named_by(lambda seed: ..., seed=1, attempt=2)
    {'seed': 1}
    """
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


@runtime_checkable
class CountsSandbox(Protocol):
    """A suite that reuses outcomes of its sandbox and counts them; implementing it is optional."""

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (outcomes that were reused, outcomes in all) since the start."""
        ...


class SplitTable:
    """The splits of a suite, given as a table of ids by split: `train`, then the held-out sets."""

    def __init__(self, ids: Mapping[str, Sequence[str]]) -> None:
        self._ids = ids

    def splits(self) -> Sequence[str]:
        """Return the names of the held-out sets, the primary one first."""
        return [name for name in self._ids if name != TRAIN]

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order. Raises ValueError for a split that does not exist."""
        if split not in self._ids:
            raise ValueError(f"no split {split!r}; there are {', '.join(self._ids)}.")
        return self._ids[split]


def suite_tools(suite: Suite) -> list[dict[str, Any]] | None:
    """Return the schemas of tools that the chat template displays; None when the suite has none."""
    return getattr(suite, "tools", None) or None


def sandbox_counts(suite: Suite) -> tuple[int, int]:
    """Return (outcomes that were reused, outcomes in all) of a suite's sandbox; zeros when it counts none."""
    return suite.sandbox_counts() if isinstance(suite, CountsSandbox) else (0, 0)
