"""Injected slowness: a suite some of whose episodes wait before they answer an action.

It wraps any suite and keeps its contract. What is slow is drawn from the run's seed, the instance and the
number of its attempt, so a run repeats it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlpipe.envs.base import Episode, StepResult, Suite

if TYPE_CHECKING:
    from rlpipe.config.injection import InjectionConfig


class SlowSuite:
    """A suite some of whose episodes wait before they answer an action."""

    def __init__(self, suite: Suite, config: InjectionConfig, seed: int) -> None:
        """seed: of the run; with the instance and the number of its attempt it decides what is slow."""
        self._suite, self._config, self._seed = suite, config, seed
        self._attempts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.max_turns = suite.max_turns

    def splits(self) -> Sequence[str]:
        """The suite's."""
        return self._suite.splits()

    def instance_ids(self, split: str) -> Sequence[str]:
        """The suite's."""
        return self._suite.instance_ids(split)

    def sandbox_counts(self) -> tuple[int, int]:
        """The suite's."""
        return self._suite.sandbox_counts()

    def episode(self, instance_id: str) -> Episode:
        """The suite's, slow or not."""
        with self._counting:
            self._attempts[instance_id] += 1
            attempt = self._attempts[instance_id]
        drawn = random.Random(f"slow/{self._seed}/{instance_id}/{attempt}").random()
        episode = self._suite.episode(instance_id)
        slow = drawn < self._config.slow_env_share
        return _SlowEpisode(episode, self._config.slow_env_seconds) if slow else episode


class _SlowEpisode:
    def __init__(self, episode: Episode, seconds: float) -> None:
        self._episode, self._seconds = episode, seconds

    def messages(self) -> list[dict[str, str]]:
        return self._episode.messages()

    def step(self, action: str) -> StepResult:
        time.sleep(self._seconds)
        return self._episode.step(action)

    def finish(self) -> StepResult:
        return self._episode.finish()

    def close(self) -> None:
        self._episode.close()
