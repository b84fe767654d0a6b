"""Rehearses a user's environment with random answers before anything is started.

`contract` checks every value that the environment returns. A value that fails the check raises ValueError
with the file and line that returned or raised it. If the environment raises `InfrastructureError`, its code
is not at fault, and the rehearsal ends. The rehearsal runs in a thread, as rollouts do, so that code which
works only in the main thread (signals) fails here already.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from rlpipe.config.user_code import described, raised_at
from rlpipe.envs.base import (
    TRAIN,
    Episode,
    Game,
    GroupMember,
    InfrastructureError,
    StepResult,
    Suite,
    close_episode,
    finish_episode,
    named_by,
)
from rlpipe.envs.contract import group_rewards, messages_of, step_of
from rlpipe.envs.running import line_of_thread

T = TypeVar("T")
_LARGE = 10_000.0  # a reward beyond it is noted
_SAY_S = 30.0  # between two lines about a call that takes long
_WORDS = 8  # a random answer has fewer words than this


class Runner(Protocol):
    """Runs coroutines, as asyncio.Runner does."""

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine."""
        ...


class Prompts(Protocol):
    """The model's chat template and limits; `rlpipe.rollout.prompt_check` has them."""

    max_context: int

    def opening(self, messages: list[dict[str, Any]]) -> int:
        """Return the tokens of opening messages. Raises ValueError when the template refuses them."""
        ...

    def observation(self, observation: Any) -> None:
        """Raise ValueError when the template refuses an observation."""
        ...


@dataclass(slots=True, kw_only=True)
class Rehearsed:
    """Outcome of a rehearsal. steps: number of steps run. notes: allowed, but worth checking."""

    steps: int = 0
    notes: list[str] = field(default_factory=list)


def rehearse(
    suite: Suite,
    name: str,
    *,
    episodes: int,
    turns: int = 0,
    budget_s: float = 0.0,
    timeout_s: float = 0.0,
    prompts: Prompts | None = None,
    setting: str = "env.suite",
) -> Rehearsed:
    """Run `episodes` of every split: each step, finish and close.

    name, setting: of the suite's maker, for messages. turns: maximum number in an episode (0: max_turns).
    budget_s: seconds after which no further call is made (0: no limit). timeout_s: limit of a
    call that has begun by then (0: none). prompts: renders what the model would read. Raises ValueError.
    """
    turns = min(turns or suite.max_turns, suite.max_turns)
    end = time.monotonic() + budget_s if budget_s else float("inf")
    where = f"{setting}={name!r}"

    def run() -> Rehearsed:
        with asyncio.Runner() as runner:
            rehearsal = _Rehearsal(suite, where, turns=turns, end=end, prompts=prompts, runner=runner)
            return rehearsal.run(episodes)

    return _in_thread(run, where, budget_s + timeout_s if budget_s and timeout_s else 0.0)


class _Rehearsal:
    def __init__(
        self,
        suite: Suite,
        where: str,
        *,
        turns: int,
        end: float,
        prompts: Prompts | None,
        runner: asyncio.Runner,
    ) -> None:
        self._suite, self._where, self._turns, self._end = suite, where, turns, end
        self._prompts, self._runner = prompts, runner
        self._random = random.Random(0)
        self._done = Rehearsed()

    def run(self, episodes: int) -> Rehearsed:
        """Run episodes of every split until the time is over, or the infrastructure fails."""
        try:
            for split in (TRAIN, *self._suite.splits()):
                ids = list(self._suite.instance_ids(split))
                chosen = self._random.sample(ids, min(episodes, len(ids)))
                lengths = [length for instance in chosen if (length := self._run_episode(instance))]
                self._check_lengths(split, lengths)
        except InfrastructureError:
            pass
        return self._done

    def _run_episode(self, instance: str) -> int:
        """Run one episode until it is done, out of turns or out of time; return the tokens of its prompt.

        Returns 0 when there is no time for it, or nothing to count tokens with.
        """
        if self._is_over():
            return 0
        where = f"{self._where}, instance {instance!r}"
        call_user = _Call(where, self._runner)

        start = self._suite.episode
        start = partial(start, **named_by(start, seed=0, attempt=0))
        episode: Episode = call_user(_unchanged, start, instance)
        if isinstance(episode, Game):
            call_user(_unchanged, partial(self._run_game, episode))
            return 0

        actions: list[str] = []
        reward, info = 0.0, {}
        try:
            opening = call_user(messages_of, episode.messages)
            tokens = call_user.check(self._prompts.opening, opening) if self._prompts else 0

            # Answers from words of the question get further into the user's code than noise does.
            vocabulary = " ".join(message["content"] for message in opening).split() or ["word"]
            done = False
            for _ in range(self._turns):
                if self._is_over():
                    return tokens

                action = " ".join(self._random.choices(vocabulary, k=self._random.randrange(_WORDS)))
                step = call_user(self._checked, episode.step, action)
                self._done.steps += 1
                actions.append(action)
                reward, info = reward + (step.reward or 0.0), info | step.info
                done = step.done
                if done:
                    break
                if self._prompts:
                    call_user.check(self._prompts.observation, step.observation)

            if not done and (finish := getattr(episode, "finish", None)):
                call_user(lambda returned: step_of(returned, last=True, rehearsed=True), finish)
        finally:
            # An error of `close` must not hide the one that is on its way.
            close = getattr(episode, "close", None)
            if close is not None and sys.exc_info()[0] is None:
                call_user(_unchanged, close)
        # Two siblings that did the same.
        if score_group := getattr(self._suite, "score_group", None):
            member = GroupMember(text=(actions or [""])[-1], turns=actions, reward=reward, info=info)
            call_user(lambda returned: group_rewards(returned, 2), score_group, instance, [member] * 2)
        return tokens

    async def _run_game(self, game: Game) -> None:
        """Run all seats of a game at once until it is done, or out of turns or time."""

        async def play(seat: Episode) -> None:
            first = await _if_awaitable(seat.messages())
            step = step_of(first, last=True) if isinstance(first, StepResult) else None
            opening = [] if step else messages_of(first)
            if self._prompts and opening:
                self._prompts.opening(opening)

            vocabulary = " ".join(message["content"] for message in opening).split() or ["word"]
            for _ in range(self._turns):
                if (step and step.done) or self._is_over():
                    break
                action = " ".join(self._random.choices(vocabulary, k=self._random.randrange(_WORDS)))
                step = self._checked(await _if_awaitable(seat.step(action)))
                self._done.steps += 1
            # A seat that ends without its end would leave the others waiting.
            if not (step and step.done):
                step_of(await _if_awaitable(finish_episode(seat)), last=True, rehearsed=True)

        await asyncio.gather(*map(play, game.seats))
        await _if_awaitable(close_episode(game))

    def _checked(self, returned: object) -> StepResult:
        """Return a checked result; a reward of unusual size is noted once."""
        result = step_of(returned, rehearsed=True)
        if abs(result.reward or 0.0) > _LARGE and not any("rewards of" in note for note in self._done.notes):
            self._done.notes.append(
                f"step() of {self._where} returned reward={result.reward:.3g}: rewards of "
                f"more than {_LARGE:.0f} in size hide all differences between the others in their group; "
                "0 to 1 is usual."
            )
        return result

    def _check_lengths(self, split: str, lengths: list[int]) -> None:
        """Refuse a split none of whose prompts fits into the context; note one of which some do not."""
        if self._prompts is None or not lengths:
            return
        limit = self._prompts.max_context
        too_long = [length for length in lengths if length >= limit]
        what = (
            f"{len(too_long)} of the {len(lengths)} prompts tried of split {split!r} leave no token to "
            f"generate (the longest has {max(lengths)}): raise rollout.max_context={limit}, or shorten the "
            "prompts"
        )
        if len(too_long) == len(lengths):
            raise ValueError(f"{self._where}: {what}.")
        if too_long:
            self._done.notes.append(f"{what}. The others are trained on, these are masked.")

    def _is_over(self) -> bool:
        return time.monotonic() > self._end


class _Call:
    """Calls user functions, names the location in messages, and awaits those that are `async def`."""

    def __init__(self, where: str, runner: asyncio.Runner) -> None:
        self._where, self._runner, self._location = where, runner, "?"

    def __call__(self, check: Callable[[Any], Any], function: Callable[..., Any], *arguments: Any) -> Any:
        returned, self._location = _call(self._where, self._runner, function, *arguments)
        return self.check(check, returned)

    def check(self, check: Callable[[Any], Any], returned: object) -> Any:
        """Return a checked value; an error names the line that returned the last value of a call."""
        return _checked(self._where, self._location, check, returned)


def call(
    where: str,
    check: Callable[[Any], Any],
    function: Callable[..., Any],
    *arguments: Any,
    runner: Runner | None = None,
) -> Any:
    """Call a function of the user and return its checked result. Raises ValueError with file and line.

    runner: awaits the function's result, if that is allowed.
    """
    returned, location = _call(where, runner, function, *arguments)
    return _checked(where, location, check, returned)


def _checked(where: str, location: str, check: Callable[[Any], Any], returned: object) -> Any:
    try:
        return check(returned)
    except ValueError as error:
        raise ValueError(f"{location}: {error} ({where})") from None


def _call(
    where: str, runner: Runner | None, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, str]:
    """Return what a user function returns, and the file and line that returned it."""
    location = ["?"]
    coroutine: CodeType | None = None
    is_called = True

    def note(frame: FrameType, event: str, _: object) -> None:
        # A loop calls the frames of a coroutine, so they are known by their code.
        is_user = frame.f_back is here if is_called else frame.f_code is coroutine
        if event == "return" and is_user:
            location[0] = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # Only a profile function sees which line of the user's function returned.
    here, before = sys._getframe(), sys.getprofile()
    sys.setprofile(note)
    try:
        returned = function(*arguments)
        is_called = False
        if inspect.isawaitable(returned):
            coroutine = getattr(returned, "cr_code", None)
            returned = _awaited(returned, runner)
    except (InfrastructureError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: an environment must not end the run
        sys.setprofile(before)
        user = function.func if isinstance(function, partial) else function
        name = getattr(user, "__qualname__", str(user)).rpartition(".")[2]
        raise ValueError(
            f"{raised_at(error)}: {name}() raised {described(error)} ({where}). Correct it, or "
            "raise InfrastructureError where something other than the model failed."
        ) from error
    finally:
        sys.setprofile(before)
    return returned, location[0]


def _awaited(awaitable: Awaitable[Any], runner: Runner | None) -> Any:
    """Return the result of an `async def` function. Raises TypeError where there is no loop for it."""
    if runner is None:
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise TypeError("it is `async def`, which only the methods of an episode may be: write `def`")

    async def outcome() -> Any:
        return await awaitable

    return runner.run(outcome())


async def _if_awaitable(returned: object) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _unchanged(returned: T) -> T:
    return returned


def _in_thread(function: Callable[[], T], where: str, limit_s: float) -> T:
    """Return the result of a function that runs in a thread, or raise its error.

    Reports its position at intervals. Raises ValueError when it has not returned after limit_s (0: none).
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rehearsal", daemon=True)
    started = time.monotonic()
    thread.start()
    while thread.is_alive():
        seconds = time.monotonic() - started
        if limit_s and seconds > limit_s:
            raise ValueError(
                f"{line_of_thread(thread)}: it is there after {seconds:.0f} s ({where}), longer than "
                "env.step_timeout_s. Make that line return or raise; if it only is slow, increase that."
            )
        thread.join(min(_SAY_S, limit_s or _SAY_S))
        if thread.is_alive():
            print(f"rlpipe: trying {where} before the start; it is at {line_of_thread(thread)}", flush=True)
    if errors:
        raise errors[0]
    return results[0]
