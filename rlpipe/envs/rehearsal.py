"""Rehearses a user's environment with random answers before anything is started.

Every value that it returns is checked by `contract`. A value that fails the check is a ValueError with
the file and the line that returned or raised it. When the environment raises `InfrastructureError`, its code
is not at fault: the rehearsal ends there.
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

_WORDS = 8  # a random answer has fewer words than this


def rehearse(suite: Suite, name: str, *, episodes: int, turns: int = 0, budget_s: float = 0.0) -> int:
    """Run `episodes` of every split, each step, finish and close; return the number of steps run.

    name: what made the suite, for messages. turns: at most so many in an episode (0: max_turns). budget_s:
    seconds after which no further call is made (0: no limit). Raises ValueError.
    """
    rng, steps = random.Random(0), 0
    end = time.monotonic() + budget_s if budget_s else float("inf")
    try:
        for split in (TRAIN, *suite.splits()):
            ids = list(suite.instance_ids(split))
            for instance in rng.sample(ids, min(episodes, len(ids))):
                if time.monotonic() > end:
                    return steps
                max_turns = min(turns or suite.max_turns, suite.max_turns)
                steps += _run_episode(suite, name, instance, rng=rng, turns=max_turns, end=end)
    except InfrastructureError:
        return steps
    return steps


def _run_episode(
    suite: Suite, name: str, instance: str, *, rng: random.Random, turns: int, end: float
) -> int:
    """Run one episode until it is done, out of turns or out of time; return its steps."""
    where = f"env.suite={name!r}, instance {instance!r}"

    episode = call(where, lambda returned: returned, suite.episode, instance)
    done, steps = False, 0

    try:
        opening = call(where, messages_of, episode.messages)
        # Answers from words of the question get further into the user's code than noise does.
        vocabulary = " ".join(message["content"] for message in opening).split() or ["word"]

        for _ in range(turns):
            if time.monotonic() > end:
                return steps

            action = " ".join(rng.choices(vocabulary, k=rng.randrange(_WORDS)))
            done = call(where, step_of, episode.step, action).done
            steps += 1
            if done:
                break

        if not done:
            call(where, lambda returned: step_of(returned, last=True), episode.finish)
    finally:
        # An error of `close` must not hide the one that is on its way.
        if sys.exc_info()[0] is None:
            call(where, lambda returned: returned, episode.close)
    return steps


def call(where: str, check: Callable[[Any], Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's and return its checked result. Raises ValueError with file and line."""
    location = ["?"]

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_back is here:
            location[0] = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # Only a profile function sees which line of the user's function returned.
    here, before = sys._getframe(), sys.getprofile()
    sys.setprofile(note)
    try:
        returned = function(*arguments)
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
        return check(returned)
    except ValueError as error:
        raise ValueError(f"{location[0]}: {error} ({where})") from None
