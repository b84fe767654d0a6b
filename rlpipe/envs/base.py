"""The environment Protocol: a suite lists instances; an episode is one attempt at one instance.

Owns the interface between collector and environments. The methods of an `Episode` may block (for example, to
run a sandbox), so the collector calls them in threads. It awaits `async def` methods in an event loop that
runs in a separate thread (`envs.user_loop`). Infrastructure failures raise `InfrastructureError`; they never
become a reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import socket
from typing import Any, Protocol, runtime_checkable

TRAIN = "train"  # name of the training split


class InfrastructureError(RuntimeError):
    """The environment failed, not the model: the attempt is retried, and masked if it fails again."""


class AgentFailed(RuntimeError):
    """The program of an agent failed. place: "file:line" of the failure in it, or what names the program."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Outcome of one action.

    observation: what the model reads next (empty when done): a text, or chat messages with the roles user,
        tool or system.
    done: the episode is over, and `reward` is set.
    reward: reward of this step; the reward of a trajectory is the sum over its steps. None counts as 0 while
        the episode is not done.
    truncated: a limit of the environment, not the model, ended the episode. The trajectory is counted
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

    text: the model's text in the last turn. turns: its texts in all turns. reward: sum over the steps.
    info: the metadata that is recorded, including what `score_group` adds to it.
    """

    text: str
    turns: list[str]
    reward: float
    info: dict[str, Any]


# Return type of `step`: a number is the reward and ends the episode; a text is the next observation.
Step = StepResult | float | str
Opening = list[dict[str, str]] | StepResult


class Episode(Protocol):
    """One attempt. Each method may be `async def`; an ordinary method may block.

    Two methods are optional. `finish()` is called when turns or context are used up; it returns a reward or a
    `StepResult` with done=True. Without `finish`, the episode ends with the rewards of its steps. `close()`
    is called at the end to free resources.
    """

    def messages(self) -> Opening | Awaitable[Opening]:
        """Return the opening chat messages, [{'role': ..., 'content': ...}, ...].

        Only a seat of a `Game` may return a `StepResult`, if the game is over before its first turn."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Act on the text that the model wrote this turn.

        If `rollout.max_new_tokens` cut the turn off, `action` is the text up to the cut.
        Raises InfrastructureError when something other than the model failed."""
        ...


@runtime_checkable
class Game(Protocol):
    """A game with several players, all played by the policy; each player has a trajectory and a reward.

    A suite that returns a `Game` has a method `players(instance_id)` that returns the number of players, see
    `Suite`. `envs.seats` makes the seats of a game in which players take turns. `close()` is optional, as for
    an `Episode`.
    """

    @property
    def seats(self) -> Sequence[Episode]:
        """Return an episode for each player. All run concurrently; `async def` methods share one thread."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentAddress:
    """The endpoint through which an agent calls the model during one attempt.

    root_url: address of the endpoint, such as http://127.0.0.1:40123. api_key: valid for this attempt only.
    answer_at: function that makes the endpoint also serve a listening socket until the attempt ends, such as
    a socket in the network of a sandbox; may be called from any event loop.
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

    Four members are optional. The attribute `tools` holds the OpenAI schemas of the tools that the chat
    template shows. `score_group(instance_id, results)` is called once with the finished attempts at an
    instance, a list of `GroupMember`, and returns their final rewards in order. `train_stages()` defines a
    curriculum: it returns the training instances as several lists, which every epoch goes through in order.
    `players(instance_id)` returns how many attempts take part in one `Game` at an instance (default 1).
    """

    max_turns: int

    def splits(self) -> Sequence[str]:
        """Return the names of the held-out sets, the primary one first."""
        ...

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order."""
        ...

    def episode(self, instance_id: str) -> Episode | AgentEpisode | Game:
        """Start a new attempt at an instance.

        The method may have two more parameters: `seed`, an integer that differs for each attempt and is
        reproducible from the run's seed, and `attempt`, the 0-based index of the attempt in its group.
        """
        ...


def train_stages(suite: Suite) -> Sequence[Sequence[str]]:
    """Return the training instances of each stage of the curriculum; without a curriculum, one stage."""
    stages = getattr(suite, "train_stages", None)
    return [suite.instance_ids(TRAIN)] if stages is None else stages()


def num_players(suite: Suite, instance_id: str) -> int:
    """Return how many attempts at an instance take part in one game."""
    players = getattr(suite, "players", None)
    return 1 if players is None else players(instance_id)


def seats_of(episode: Any) -> Sequence[Any]:
    """Return the episodes of a game's players; for an ordinary episode, a list with that episode."""
    return getattr(episode, "seats", [episode])


def start_episode(suite: Suite, instance_id: str, *, seed: int, attempt: int) -> Any:
    """Start an attempt; pass `seed` and `attempt` if `suite.episode` has parameters of these names."""
    return suite.episode(instance_id, **named_by(suite.episode, seed=seed, attempt=attempt))


def finish_episode(episode: Episode) -> Any:
    """Call `finish` of an episode; if it has none, return a last step with reward 0."""
    finish = getattr(episode, "finish", None)
    return StepResult(done=True, reward=0.0) if finish is None else finish()


def close_episode(episode: Episode | Game) -> Any:
    """Call `close` of an episode, if it has one."""
    close = getattr(episode, "close", None)
    return None if close is None else close()


def named_by(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments whose names are parameters of a function.

    >>> named_by(lambda seed: ..., seed=1, attempt=2)
    {'seed': 1}
    """
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


@runtime_checkable
class CountsSandbox(Protocol):
    """A suite that caches outcomes of its sandbox and counts cache hits. Suites need not implement this."""

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (number of reused outcomes, number of all outcomes) since the start."""
        ...


class SplitTable:
    """Base of suites that hold their instance ids in a table by split: `train`, then the held-out sets."""

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
    """Return (reused outcomes, all outcomes) of a suite's sandbox, or (0, 0) if it does not count them."""
    return suite.sandbox_counts() if isinstance(suite, CountsSandbox) else (0, 0)
