"""Rehearses a user's environment with random answers before anything is started.

`contract` checks every value that the environment returns. If a value fails the check, or the code raises, a
ValueError names the file and line. If the environment raises `InfrastructureError`, its code is not the
cause, and the rehearsal ends. The rehearsal runs in a thread, as rollouts do, so that code that works only in
the main thread (such as signals) already fails here.
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
_LARGE = 10_000.0  # a larger reward gives a note
_SAY_S = 30.0  # interval between progress lines on a slow call
_WORDS = 8  # a random answer has fewer words than this


class Runner(Protocol):
    """Runs coroutines, as asyncio.Runner does."""

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine."""
        ...


class Prompts(Protocol):
    """Checks prompts against the chat template and counts tokens; see `rlpipe.rollout.prompt_check`."""

    max_context: int

    def opening(self, messages: list[dict[str, Any]]) -> int:
        """Return the number of tokens of opening messages. Raises ValueError if the template rejects them."""
        ...

    def observation(self, observation: Any) -> None:
        """Raise ValueError if the template rejects an observation."""
        ...


@dataclass(slots=True, kw_only=True)
class Rehearsed:
    """Outcome of a rehearsal. steps: number of steps run. notes: remarks on allowed but unusual values."""

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
    """Run `episodes` episodes of every split, and call `finish` and `close` of each.

    name, setting: value and name of the setting that selects the suite, for messages. turns: maximum number
    of turns of an episode (0: max_turns). budget_s: seconds after which no new call starts (0: no limit).
    timeout_s: time limit of a call that is running at that time (0: none). prompts: checks the model's input.
    Raises ValueError if a check fails.
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
        """Run episodes of every split until the time is used up or the infrastructure fails."""
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
        """Run one episode until it is done, out of turns or out of time.

        Returns the number of tokens of its prompt; 0 if the time is used up or there is no chat template.
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

            # Random words of the question reach more of the user's code than random characters.
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
            # An error in `close` must not replace an earlier one, so do not call it while one is raised.
            close = getattr(episode, "close", None)
            if close is not None and sys.exc_info()[0] is None:
                call_user(_unchanged, close)
        # Call `score_group` with two copies of this attempt.
        if score_group := getattr(self._suite, "score_group", None):
            member = GroupMember(text=(actions or [""])[-1], turns=actions, reward=reward, info=info)
            call_user(lambda returned: group_rewards(returned, 2), score_group, instance, [member] * 2)
        return tokens

    async def _run_game(self, game: Game) -> None:
        """Run all seats of a game concurrently until it is done, or turns or time are used up."""

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
            # Always finish a seat: the other seats would wait for it forever.
            if not (step and step.done):
                step_of(await _if_awaitable(finish_episode(seat)), last=True, rehearsed=True)

        await asyncio.gather(*map(play, game.seats))
        await _if_awaitable(close_episode(game))

    def _checked(self, returned: object) -> StepResult:
        """Return a checked result; add a note for the first unusually large reward."""
        result = step_of(returned, rehearsed=True)
        if abs(result.reward or 0.0) > _LARGE and not any("rewards of" in note for note in self._done.notes):
            self._done.notes.append(
                f"step() of {self._where} returned reward={result.reward:.3g}: rewards of "
                f"more than {_LARGE:.0f} in size hide all differences between the others in their group; "
                "0 to 1 is usual."
            )
        return result

    def _check_lengths(self, split: str, lengths: list[int]) -> None:
        """Raise ValueError if no prompt of a split fits into the context; add a note if some do not."""
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
    """Calls user functions, awaits `async def` ones, and adds the location to error messages."""

    def __init__(self, where: str, runner: asyncio.Runner) -> None:
        self._where, self._runner, self._location = where, runner, "?"

    def __call__(self, check: Callable[[Any], Any], function: Callable[..., Any], *arguments: Any) -> Any:
        returned, self._location = _call(self._where, self._runner, function, *arguments)
        return self.check(check, returned)

    def check(self, check: Callable[[Any], Any], returned: object) -> Any:
        """Return a checked value; an error names the line at which the last call returned."""
        return _checked(self._where, self._location, check, returned)


def call(
    where: str,
    check: Callable[[Any], Any],
    function: Callable[..., Any],
    *arguments: Any,
    runner: Runner | None = None,
) -> Any:
    """Call a user's function and return its checked result. Raises ValueError with file and line.

    runner: awaits the result of an `async def` function; None if the function must not be async.
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
    """Call a user's function; return its result, and the file and line of the return."""
    location = ["?"]
    coroutine: CodeType | None = None
    is_called = True

    def note(frame: FrameType, event: str, _: object) -> None:
        # The event loop, not this function, calls the frame of a coroutine: identify it by its code object.
        is_user = frame.f_back is here if is_called else frame.f_code is coroutine
        if event == "return" and is_user:
            location[0] = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # Only a profile function can observe at which line the user's function returns.
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
    except BaseException as error:  # includes SystemExit: an environment must not end the run
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
    """Return the result of an `async def` function. Raises TypeError if `runner` is None."""
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
    """Run a function in a thread; return its result, or raise its error.

    Prints at intervals which line is running. Raises ValueError if the function has not returned after
    limit_s seconds (0: no limit).
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
