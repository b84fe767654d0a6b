"""Plays an environment of one's own with random answers before anything is started.

Every value that it returns is held to `contract`; what breaks it is a ValueError that names the file and the
line that returned or raised it. A failure that the environment itself calls one of its infrastructure
(`InfrastructureError`) is none of its code's: the rehearsal ends there.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlpipe.config.user_code import described, raised_at
from rlpipe.envs.base import TRAIN, InfrastructureError, Suite
from rlpipe.envs.contract import messages_of, step_of

_WORDS = 8  # most words of a random answer


def rehearse(suite: Suite, name: str, *, episodes: int, turns: int = 0, budget_s: float = 0.0) -> int:
    """Play `episodes` of every split, each step, finish and close; returns the steps played.

    name: what made the suite, for messages. turns: of an episode, at most (0: max_turns). budget_s: seconds
    after which no further call is made (0: no limit). Raises ValueError.
    """
    rng, steps = random.Random(0), 0
    end = time.monotonic() + budget_s if budget_s else float("inf")
    try:
        for split in (TRAIN, *suite.splits()):
            ids = list(suite.instance_ids(split))
            for instance in rng.sample(ids, min(episodes, len(ids))):
                if time.monotonic() > end:
                    return steps
                steps += _episode(
                    suite, name, instance, rng, min(turns or suite.max_turns, suite.max_turns), end
                )
    except InfrastructureError:
        return steps
    return steps


def _episode(suite: Suite, name: str, instance: str, rng: random.Random, turns: int, end: float) -> int:
    where = f"env.suite={name!r}, instance {instance!r}"
    episode = call(where, lambda said: said, suite.episode, instance)
    done, steps = False, 0
    try:
        opening = call(where, messages_of, episode.messages)
        words = " ".join(message["content"] for message in opening).split() or ["word"]
        for _ in range(turns):
            if time.monotonic() > end:
                return steps
            action = " ".join(rng.choices(words, k=rng.randrange(_WORDS)))
            done = call(where, step_of, episode.step, action).done
            steps += 1
            if done:
                break
        if not done:
            call(where, lambda said: step_of(said, last=True), episode.finish)
    finally:
        if sys.exc_info()[0] is None:
            call(where, lambda said: said, episode.close)
    return steps


def call(where: str, check: Callable[[Any], Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's returns, after `check`. Raises ValueError with its file and line."""
    place = ["?"]

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_back is here:
            place[0] = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    here, before = sys._getframe(), sys.getprofile()
    sys.setprofile(note)
    try:
        said = function(*arguments)
    except (InfrastructureError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: an environment must not end the run
        sys.setprofile(before)
        name = getattr(function, "__qualname__", str(function)).rpartition(".")[2]
        raise ValueError(
            f"{raised_at(error)}: {name}() raised {described(error)} ({where}). Correct it, or "
            "raise InfrastructureError where something other than the model failed."
        ) from error
    finally:
        sys.setprofile(before)
    try:
        return check(said)
    except ValueError as error:
        raise ValueError(f"{place[0]}: {error} ({where})") from None
