"""Several environments in one run: a suite that delegates to its members.

Owns only the names: an instance is "MEMBER/ID", a held-out set "MEMBER.SPLIT". The members own rewards,
limits and data. `loop.prompts` decides the order of the prompts from `train_sets`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from rlpipe.envs.base import (
    TRAIN,
    AgentEpisode,
    Episode,
    Game,
    GroupMember,
    SplitTable,
    StepResult,
    Suite,
    close_episode,
    finish_episode,
    num_players,
    sandbox_counts,
    start_episode,
    suite_tools,
    train_stages,
)
from rlpipe.envs.contract import step_of


class MixtureSuite(SplitTable):
    """A suite of several suites.

    members: (share of the prompts, suite) of each member, by name; the first member is the primary one.
    """

    def __init__(self, members: Mapping[str, tuple[float, Suite]]) -> None:
        self._shares = {name: share for name, (share, _) in members.items()}
        self.members = {name: suite for name, (_, suite) in members.items()}
        self.max_turns = max(suite.max_turns for suite in self.members.values())
        self.tools = self._common_tools()

        ids: dict[str, list[str]] = {TRAIN: []}
        for name, suite in self.members.items():
            ids[TRAIN] += _named(name, suite.instance_ids(TRAIN))
            ids |= {f"{name}.{split}": _named(name, suite.instance_ids(split)) for split in suite.splits()}
        super().__init__(ids)

        # The collector scores whole groups only if the attribute exists.
        if any(hasattr(suite, "score_group") for suite in self.members.values()):
            self.score_group = self._score_group

    def train_sets(self) -> list[tuple[float, list[list[str]]]]:
        """Return (share, training instances of each curriculum stage) of each member."""
        return [
            (self._shares[name], [_named(name, stage) for stage in train_stages(suite)])
            for name, suite in self.members.items()
        ]

    def episode(self, instance_id: str, seed: int = 0, attempt: int = 0) -> Episode | AgentEpisode | Game:
        """Start an attempt at an instance of a member."""
        name, _, own = instance_id.partition("/")
        suite = self.members[name]
        episode = start_episode(suite, own, seed=seed, attempt=attempt)
        if suite.max_turns == self.max_turns or isinstance(episode, AgentEpisode):
            return episode
        if isinstance(episode, Game):
            return _LimitedGame(episode, suite.max_turns)
        return _Limited(episode, suite.max_turns)

    def players(self, instance_id: str) -> int:
        """Return how many attempts at an instance of a member take part in one game."""
        name, _, own = instance_id.partition("/")
        return num_players(self.members[name], own)

    def _score_group(self, instance_id: str, results: list[GroupMember]) -> Any:
        """Return the rewards of a group, from the member's `score_group` if it has one."""
        name, _, own = instance_id.partition("/")
        score = getattr(self.members[name], "score_group", None)
        return score(own, results) if score else [result.reward for result in results]

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (number of reused outcomes, number of all outcomes), summed over all members."""
        counts = [sandbox_counts(suite) for suite in self.members.values()]
        return sum(reused for reused, _ in counts), sum(total for _, total in counts)

    def _common_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template shows. Raises ValueError if the members' tools differ."""
        tools = {name: suite_tools(suite) for name, suite in self.members.items()}
        first, *others = tools.values()
        if any(other != first for other in others):
            shown = ", ".join(name for name, own in tools.items() if own)
            raise ValueError(
                f"env.mix: the chat template would show the tools of {shown} with every prompt. Set "
                "tools.schema=system there, or use members with the same tools."
            )
        return first


class _Limited:
    """An episode of a member that allows fewer turns than the mixture."""

    def __init__(self, episode: Episode, turns: int) -> None:
        self._episode, self._left = episode, turns

    def messages(self) -> Any:
        return self._episode.messages()

    def step(self, action: str) -> Any:
        self._left -= 1
        returned = self._episode.step(action)
        if self._left:
            return returned
        return self._last(returned) if inspect.isawaitable(returned) else self._ended(returned)

    def finish(self) -> Any:
        return finish_episode(self._episode)

    def close(self) -> Any:
        return close_episode(self._episode)

    async def _last(self, returned: Awaitable[Any]) -> StepResult | Awaitable[StepResult]:
        ended = self._ended(await returned)
        return await ended if inspect.isawaitable(ended) else ended

    def _ended(self, returned: object) -> Any:
        """Return the last step; if the episode is not done, add the result of `finish`."""
        step = step_of(returned)
        if step.done:
            return step
        finished = finish_episode(self._episode)
        return self._finished(step, finished) if inspect.isawaitable(finished) else _joined(step, finished)

    async def _finished(self, step: StepResult, finished: Awaitable[Any]) -> StepResult:
        return _joined(step, await finished)


class _LimitedGame:
    """A game of a member that allows fewer turns than the mixture."""

    def __init__(self, game: Game, turns: int) -> None:
        self._game, self.seats = game, [_Limited(seat, turns) for seat in game.seats]

    def close(self) -> Any:
        return close_episode(self._game)


def _joined(step: StepResult, finished: Any) -> StepResult:
    end = step_of(finished, last=True)
    reward = (step.reward or 0.0) + (end.reward or 0.0)
    return StepResult(done=True, truncated=True, reward=reward, info=step.info | end.info)


def _named(name: str, instance_ids: Sequence[str]) -> list[str]:
    return [f"{name}/{instance_id}" for instance_id in instance_ids]
