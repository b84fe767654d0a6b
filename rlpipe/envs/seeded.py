"""Shared parts of environments in which an instance is a seed: ids, splits, a suite, random state, extras.

Held-out seeds start at 0 for every seed of the run, and training seeds at (1 + seed) million, so the two sets
never overlap.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable
from typing import Any

from rlpipe.config.env import INDEX_STRIDE, EnvConfig
from rlpipe.envs.base import TRAIN, SplitTable


def seed_splits(config: EnvConfig, seed: int) -> dict[str, list[str]]:
    """Return the ids "seed:N" of `train` and `held_out`. seed: the run's seed."""
    first = (1 + seed) * INDEX_STRIDE
    seeds = {TRAIN: range(first, first + config.train_size), "held_out": range(config.held_out_size)}
    return {split: [f"seed:{number}" for number in numbers] for split, numbers in seeds.items()}


def seed_of(instance_id: str) -> int:
    """Return the seed in an instance id.

    >>> seed_of("seed:3")
    3
    """
    return int(instance_id.partition(":")[2])


class SeededSuite(SplitTable):
    """A suite that makes an episode from a seed. Splits: `train` and `held_out`."""

    def __init__(self, config: EnvConfig, seed: int, make: Callable[[int], Any]) -> None:
        """seed: the run's seed. make: function that returns a new episode for an instance's seed."""
        super().__init__(seed_splits(config, seed))
        self.max_turns, self._make = config.max_turns, make

    def episode(self, instance_id: str) -> Any:
        """Start a new attempt at an instance."""
        return self._make(seed_of(instance_id))


class Luck:
    """A separate state of Python's global random generator for one game."""

    _lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with the game's random state, and restore the previous state afterwards."""
        with self._lock:
            before = random.getstate()
            random.setstate(self._state)
            try:
                return function(*args, **kwargs)
            finally:
                self._state = random.getstate()
                random.setstate(before)


def opening(config: EnvConfig, text: str) -> list[dict[str, str]]:
    """Return the opening messages: the system prompt, if one is set, and a text for the model."""
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return [*system, {"role": "user", "content": text}]


def require(package: str, extra: str) -> None:
    """Raise ValueError with the installation command if a package that an environment needs is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"env={extra} needs the package {package}, which is not installed: "
            f"pip install {package}, in a checkout pip install -e '.[{extra}]' -c constraints.txt."
        )
