"""A suite that lives outside the package: found by name, made, and checked before anything is played."""

from __future__ import annotations

from collections.abc import Callable

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.base import Suite

METHODS = ("splits", "instance_ids", "episode", "sandbox_counts")


def load_suite_maker(name: str) -> Callable[[EnvConfig, int], Suite]:
    """The function that `env.suite` names. Raises ValueError when it cannot be imported or called."""
    return load_function(name, setting="env.suite", takes="config, seed")


def make_user_suite(config: EnvConfig, seed: int) -> Suite:
    """What that function makes. Raises ValueError for something that is no suite, or has nothing to play."""
    suite = load_suite_maker(config.suite)(config, seed)
    missing = [name for name in METHODS if not callable(getattr(suite, name, None))]
    if missing or not isinstance(getattr(suite, "max_turns", None), int):
        raise ValueError(
            f"env.suite={config.suite!r} made a {type(suite).__name__} without "
            f"{', '.join(missing) or 'an integer max_turns'}: see Suite in rlpipe.envs.base."
        )
    for split in ("train", *suite.splits()):
        if not suite.instance_ids(split):
            raise ValueError(f"env.suite={config.suite!r} has no instances in its split {split!r}.")
    if not suite.splits():
        raise ValueError(f"env.suite={config.suite!r} has no held-out split: validation needs one.")
    return suite
