"""Injected slowness: some episodes of a suite wait before they answer an action.

Wraps any suite without changing its interface. Which episodes are slow depends only on the run's seed, the
instance and the index of the attempt, so runs with the same seed have the same slow episodes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from rlpipe.envs.base import Episode, Step, Suite, start_episode

if TYPE_CHECKING:
    from rlpipe.config.injection import InjectionConfig


class SlowSuite:
    """A suite in which some episodes wait before they answer an action."""

    def __init__(self, suite: Suite, config: InjectionConfig, seed: int) -> None:
        """seed: the run's seed, which with instance and attempt determines which episodes are slow."""
        self._suite, self._config, self._seed = suite, config, seed
        self._attempts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the suite, including optional ones such as `tools`."""
        return getattr(self._suite, name)

    def episode(self, instance_id: str, seed: int = 0, attempt: int = 0) -> Episode:
        """Start an episode of the suite, and make it slow if the seed selects it."""
        with self._counting:
            self._attempts[instance_id] += 1
            start = self._attempts[instance_id]

        sample = random.Random(f"slow/{self._seed}/{instance_id}/{start}").random()

        episode = start_episode(self._suite, instance_id, seed=seed, attempt=attempt)
        slow = sample < self._config.slow_env_share
        return _SlowEpisode(episode, self._config.slow_env_seconds) if slow else episode


class _SlowEpisode:
    def __init__(self, episode: Episode, seconds: float) -> None:
        self._episode, self._seconds = episode, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def step(self, action: str) -> Step | Awaitable[Step]:
        time.sleep(self._seconds)
        return self._episode.step(action)
