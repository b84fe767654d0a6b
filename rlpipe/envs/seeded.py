"""What the adapters of environment libraries share: a suite of which each instance is a seed, and the extras.

Held-out seeds start at 0 whatever the run's seed, training ones at (1 + seed) million, so none is in both.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable

from rlpipe.config.env import INDEX_STRIDE, EnvConfig
from rlpipe.envs.base import TRAIN, Episode, SplitTable


class SeededSuite(SplitTable):
    """A suite that makes an episode from a seed. Splits: `train` and `held_out`."""

    def __init__(self, config: EnvConfig, seed: int, make: Callable[[int], Episode]) -> None:
        """seed: of the run. make: returns a fresh attempt at the instance of a seed."""
        self.max_turns, self._make = config.max_turns, make

        first = (1 + seed) * INDEX_STRIDE
        seeds = {"held_out": range(config.held_out_size), TRAIN: range(first, first + config.train_size)}
        super().__init__({split: [str(number) for number in numbers] for split, numbers in seeds.items()})

    def episode(self, instance_id: str) -> Episode:
        """Start a fresh attempt."""
        return self._make(int(instance_id))


def opening(config: EnvConfig, text: str) -> list[dict[str, str]]:
    """Return the opening messages: the system prompt, if one is set, and a text for the model."""
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    return [*system, {"role": "user", "content": text}]


def require(package: str, extra: str) -> None:
    """Raise ValueError, with the command that installs it, when the package of an adapter is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"env={extra} needs the package {package}, which is not installed: "
            f"pip install 'rlpipe[{extra}]', in a checkout pip install -e '.[{extra}]' -c constraints.txt."
        )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean A, B?" of the names closest to one that does not exist; "" when none is close.

    >>> did_you_mean("FrozenLak-v1", ["FrozenLake-v1", "Taxi-v3"])
    ' Did you mean FrozenLake-v1?'
    """
    close = difflib.get_close_matches(name, list(names), n=3)
    return f" Did you mean {', '.join(close)}?" if close else ""
