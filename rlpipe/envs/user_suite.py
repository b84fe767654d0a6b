"""A user's suite: imported by name, made, and checked before any episode starts.

`env.suite` names a function that makes a suite, or an episode class with only `messages` and `step`; in that
case `ClassSuite` makes an episode for each seed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, cast

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.base import TRAIN, CountsSandbox, Episode, SplitTable, Suite, named_by
from rlpipe.envs.contract import shown
from rlpipe.envs.rehearsal import call
from rlpipe.envs.seeded import seed_of, seed_splits

_SLOW_S = 5.0
METHODS = ("splits", "instance_ids", "episode")


def load_suite_maker(name: str) -> Callable[[EnvConfig, int], Suite]:
    """Return the function that `env.suite` names. Raises ValueError when it cannot be imported or called."""
    return load_function(name, setting="env.suite", takes="config, seed")


class ClassSuite(SplitTable):
    """A suite made from an episode class; the instance "seed:N" has the seed N.

    All attempts of a group have the same seed, so that they can be compared. The constructor may have any of
    the parameters `seed`, `attempt` (0 to group_size - 1), `instance_id` and `options`. The class may have
    `max_turns`, `tools` and a static method `score_group`.
    """

    def __init__(self, made: type[Episode], config: EnvConfig, seed: int) -> None:
        super().__init__(seed_splits(config, seed))
        self.max_turns: int = getattr(made, "max_turns", config.max_turns)
        self.tools: list[dict[str, Any]] | None = getattr(made, "tools", None)
        self._class, self._options = made, config.options
        if score_group := getattr(made, "score_group", None):
            self.score_group = score_group

    def episode(self, instance_id: str, attempt: int = 0) -> Episode:
        """Make an instance of the episode class."""
        arguments = {
            "seed": seed_of(instance_id),
            "attempt": attempt,
            "instance_id": instance_id,
            "options": self._options,
        }
        return self._class(**named_by(self._class, **arguments))


@contextmanager
def _reported_if_slow(where: str) -> Iterator[None]:
    """Print a line if making a suite takes long, since every rollout worker also makes it."""
    text = f"rlpipe: making {where}, which each rollout worker does as well ({_SLOW_S:.0f} s so far)"
    timer = threading.Timer(_SLOW_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_episode_class(made: object) -> bool:
    """Return whether a class is an episode class rather than a suite."""
    has = [callable(getattr(made, name, None)) for name in ("messages", "step")]
    return isinstance(made, type) and all(has) and not hasattr(made, "splits")


def make_user_suite(config: EnvConfig, seed: int) -> Suite:
    """Make the suite that `env.suite` names. Raises ValueError if it is no suite or has invalid ids."""
    where = f"env.suite={config.suite!r}"
    maker = load_suite_maker(config.suite)
    if _is_episode_class(maker):
        suite = ClassSuite(cast("type[Episode]", maker), config, seed)
    else:
        with _reported_if_slow(where):
            suite = call(where, lambda made: made, maker, config, seed)

    # The user's class need not derive from `Suite`, so check its attributes one by one.
    missing = [name for name in METHODS if not callable(getattr(suite, name, None))]
    if missing or not isinstance(getattr(suite, "max_turns", None), int) or suite.max_turns < 1:
        raise ValueError(
            f"{where} made a {type(suite).__name__} without "
            f"{', '.join(missing) or 'an integer max_turns above 0'}: see Suite in rlpipe.envs.base."
        )

    splits = call(where, lambda returned: _names("splits()", returned), suite.splits)
    for split in (TRAIN, *splits):
        call(where, lambda ids: _names("instance_ids()", ids), suite.instance_ids, split)
    if not splits:
        raise ValueError(f"{where} has no held-out split: validation needs one, as in ['held_out'].")
    _check_ids(where, suite, splits)

    if isinstance(suite, CountsSandbox):
        call(where, _counts, suite.sandbox_counts)
    return suite


def _check_ids(where: str, suite: Suite, splits: Sequence[str]) -> None:
    """Raise ValueError if ids are missing, repeated, in both training and held-out sets, or not stable."""
    trained = set(suite.instance_ids(TRAIN))
    for split in (TRAIN, *splits):
        ids = list(suite.instance_ids(split))
        if not ids:
            raise ValueError(f"{where} has no instances in its split {split!r}: return one or more ids.")

        if repeated := [name for name, count in Counter(ids).items() if count > 1]:
            raise ValueError(
                f"{where}: instance_ids({split!r}) has {repeated[0]!r} {ids.count(repeated[0])} times "
                f"({len(repeated)} such ids): return each id once."
            )

        shared = sorted(trained.intersection(ids)) if split != TRAIN else []
        if shared:
            raise ValueError(
                f"{where}: {len(shared)} ids of the held-out split {split!r} are trained on as well, such as "
                f"{shared[0]!r}: leave them out of one of the two."
            )

        if (again := list(suite.instance_ids(split))) != ids:
            differs = next(n for n, pair in enumerate(zip_longest(ids, again)) if pair[0] != pair[1])
            raise ValueError(
                f"{where}: instance_ids({split!r}) changes between calls, at position {differs}: return one "
                "order, shuffled by random.Random(seed) when the suite is made."
            )


def _names(method: str, returned: Any) -> Sequence[str]:
    """Return the value of a method if it is a sequence of strings. Raises ValueError otherwise."""
    is_list = isinstance(returned, Sequence) and not isinstance(returned, str)
    if not is_list or not all(isinstance(name, str) for name in returned):
        raise ValueError(f"{method} returned {shown(returned)}: return a list of strings.")
    return returned


def _counts(returned: Any) -> None:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not all(isinstance(count, int) for count in returned):
        raise ValueError(
            f"sandbox_counts() returned {shown(returned)}: return two integers, (0, 0) for none."
        )
