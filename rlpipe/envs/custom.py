"""A suite that lives outside the package: found by name, made, and checked before anything is played."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import Suite

METHODS = ("splits", "instance_ids", "episode", "sandbox_counts")


def load_suite_maker(name: str) -> Callable[[EnvConfig, int], Suite]:
    """The function that `env.suite` names. Raises ValueError when it cannot be imported or called.

    The folder the run was started in is searched as well, in workers too: `python FILE` would do so.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.count(":") != 1:
        raise ValueError(f"env.suite={name!r} must be module:function, as my_env:make_suite.")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"env.suite={name!r} cannot be imported from {here}: {error}. Start the run in its folder, "
            "put that on PYTHONPATH, or install it."
        ) from error
    if not callable(found):
        raise ValueError(f"env.suite={name!r} is a {type(found).__name__}, not a function(config, seed).")
    return found


def make_custom_suite(config: EnvConfig, seed: int) -> Suite:
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
