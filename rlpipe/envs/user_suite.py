"""A suite that lives outside the package: found by name, made, and checked before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.base import TRAIN, CountsSandbox, Suite
from rlpipe.envs.contract import shown
from rlpipe.envs.rehearsal import call

METHODS = ("splits", "instance_ids", "episode")


def load_suite_maker(name: str) -> Callable[[EnvConfig, int], Suite]:
    """The function that `env.suite` names. Raises ValueError when it cannot be imported or called."""
    return load_function(name, setting="env.suite", takes="config, seed")


def make_user_suite(config: EnvConfig, seed: int) -> Suite:
    """What that function makes. Raises ValueError for something that is no suite, or has nothing to play."""
    where = f"env.suite={config.suite!r}"
    suite = call(where, lambda made: made, load_suite_maker(config.suite), config, seed)
    missing = [name for name in METHODS if not callable(getattr(suite, name, None))]
    if missing or not isinstance(getattr(suite, "max_turns", None), int) or suite.max_turns < 1:
        raise ValueError(
            f"{where} made a {type(suite).__name__} without "
            f"{', '.join(missing) or 'an integer max_turns above 0'}: see Suite in rlpipe.envs.base."
        )
    splits = call(where, lambda said: _names("splits()", said), suite.splits)
    for split in (TRAIN, *splits):
        if not call(where, lambda said: _names("instance_ids()", said), suite.instance_ids, split):
            raise ValueError(f"{where} has no instances in its split {split!r}: return one or more ids.")
    if not splits:
        raise ValueError(f"{where} has no held-out split: validation needs one, as in ['held_out'].")
    if isinstance(suite, CountsSandbox):
        call(where, _counts, suite.sandbox_counts)
    return suite


def _names(method: str, said: Any) -> Sequence[str]:
    """A sequence of strings. Raises ValueError for anything else."""
    if isinstance(said, str) or not isinstance(said, Sequence) or not all(isinstance(x, str) for x in said):
        raise ValueError(f"{method} returned {shown(said)}: return a list of strings.")
    return said


def _counts(said: Any) -> None:
    if not isinstance(said, tuple) or len(said) != 2 or not all(isinstance(x, int) for x in said):
        raise ValueError(f"sandbox_counts() returned {shown(said)}: return two integers, (0, 0) for none.")
