"""Calls every reward function before a run starts, on rows of the data set with made-up answers.

Flow: sample rows of both splits, as many as a few seconds allow -> score the right answer and random words
for each -> check every returned value. An error raises ValueError with the file and line of the function and
the row. Two cases are allowed but returned as notes: rewards that differ when computed twice, and rewards
that are all equal.
"""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from rlpipe.envs.base import TRAIN, InfrastructureError
from rlpipe.envs.function.examples import Example
from rlpipe.envs.function.rewards import LOOP, Call, Reward, Score, total
from rlpipe.envs.function.signature import Form
from rlpipe.envs.function.suite import HELD_OUT, FunctionSuite
from rlpipe.envs.rehearsal import call
from rlpipe.envs.running import line_of_thread

CALL_S = 8.0  # time limit of one call
_WORDS = 8
_ROWS = 1000  # maximum number of rows of each split


def rehearse_rewards(suite: FunctionSuite, *, budget_s: float, call_s: float = CALL_S) -> list[str]:
    """Score made-up answers for about `budget_s` seconds; return notes for the user, as sentences.

    call_s: time limit of one call, seconds. Raises ValueError for a function that fails or returns no reward.
    """
    rng, values, notes = random.Random(0), set(), []
    end = time.monotonic() + budget_s
    calls, known = 0, False
    for instance_id in _spread(suite):
        if calls and time.monotonic() > end:
            break
        example = suite.example(instance_id)
        answers = _made_up(example, rng)

        try:
            scores = [_score(reward, example, answers, call_s) for reward in suite.rewards]
            if not calls:
                again = [_score(reward, example, answers, call_s) for reward in suite.rewards]
                notes += _differences(suite.rewards, scores, again, example)
        # The code is not the cause of this error; rollouts will mask such an answer.
        except InfrastructureError as error:
            return [f"a reward function raised InfrastructureError in the rehearsal: {error}"]

        totals = total(suite.rewards, scores, example.place)
        values |= {reward for reward, _ in totals}
        calls, known = calls + 1, known or _right(example) is not None

    if len(values) == 1:
        notes.append(
            f"all made-up answers to {calls} prompts{', the right ones among them,' * known} got the reward "
            f"{values.pop():g}: as long as all answers to a prompt get the same, nothing is learned"
        )
    return notes


def _spread(suite: FunctionSuite) -> list[str]:
    """Return instances of both splits in random order, alternating between the splits."""
    ids = [list(suite.instance_ids(split)) for split in (TRAIN, HELD_OUT)]
    for each in ids:
        random.Random(0).shuffle(each)
    longest = max(map(len, ids))
    return [each[index] for index in range(min(longest, _ROWS)) for each in ids if index < len(each)]


def _right(example: Example) -> str | None:
    """Return a row's right answer as text if it is a text or a number, else None."""
    return str(example.answer) if isinstance(example.answer, (str, int, float)) else None


def _made_up(example: Example, rng: random.Random) -> list[str]:
    """Return answers to score: the right one if known, random words of the prompt, and an empty text."""
    right = [answer] if (answer := _right(example)) is not None else []
    words = example.text.split() or ["word"]
    return [*right, " ".join(rng.choices(words, k=1 + rng.randrange(_WORDS))), ""]


def _score(reward: Reward, example: Example, answers: list[str], call_s: float) -> list[Score]:
    """Return the checked scores of answers. Raises ValueError with file and line if a check fails."""
    return [
        score for one in reward.calls(example, answers) for score in _within(call_s, reward, example, one)
    ]


def _within(call_s: float, reward: Reward, example: Example, one: Call) -> list[Score]:
    """Make a call in a thread and return its scores. Raises ValueError if it fails or exceeds `call_s`."""
    where = f"{reward.where}, row {example.place}"
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call(where, one.read, one.prepared(), runner=LOOP))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="rehearsal", daemon=True)
    thread.start()
    thread.join(call_s)

    if not outcome:
        # The stack of a thread does not show a coroutine, so report the function's definition instead.
        is_async = inspect.iscoroutinefunction(reward.function)
        at = _definition(reward.function) if is_async else line_of_thread(thread)
        raise ValueError(
            f"{at}: {reward.name} has not returned after {call_s:g} s "
            f"({where}). Give what it waits for a timeout of its own; env.step_timeout_s is the limit in a "
            "run."
        )
    if isinstance(outcome[0], BaseException):
        raise _explained(outcome[0], one)
    return outcome[0]


def _explained(error: BaseException, one: Call) -> BaseException:
    """Return an error with a hint; if the line of the return is unknown, name the function's first line."""
    text = str(error)
    if not isinstance(error, ValueError):
        return error
    if text.startswith("?: "):
        text = f"{_definition(one.reward.function)}{text.removeprefix('?')}"

    # This is the most common mistake with functions that were written for TRL.
    is_text = isinstance(one.example.prompt, str)
    if is_text and one.reward.signature.form is Form.TRL and "string indices must be integers" in text:
        text += (
            " The prompts are text, so completions are text: for TRL's conversational format store a "
            "prompt as [{'role': 'user', 'content': TEXT}]."
        )
    return ValueError(text)


def _definition(function: Callable[..., Any]) -> str:
    """Return file and line where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(function, "__name__", "?")


def _differences(
    rewards: list[Reward], scores: list[list[Score]], again: list[list[Score]], example: Example
) -> list[str]:
    """Return a note for each function that gave different rewards to the same answer."""
    notes = []
    for reward, first, second in zip(rewards, scores, again, strict=True):
        for before, after in zip(first, second, strict=True):
            if before.value != after.value:
                notes.append(
                    f"{reward.name} gave one answer {before.value} and then {after.value} "
                    f"({example.place}): it depends on more than its arguments, such as a counter, random "
                    "numbers or the time"
                )
                break
    return notes
