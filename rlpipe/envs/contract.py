"""What an environment may return: checked in one place, for rehearsals and for rollouts alike.

Numbers of NumPy and torch become numbers; whatever else is not as `envs.base` says is refused with what was
returned, its value and the remedy. Loads neither library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlpipe.envs.base import StepResult

_SHOWN = 120  # characters of a value in a message


def messages_of(said: Any) -> list[dict[str, Any]]:
    """The opening messages. Raises ValueError when they are none."""
    if not isinstance(said, (list, tuple)) or not said:
        raise ValueError(
            f"messages() returned {shown(said)}: return a list like "
            "[{'role': 'user', 'content': 'question'}], with one message or more."
        )
    for number, message in enumerate(said):
        right = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not right:
            raise ValueError(
                f"messages()[{number}] is {shown(message)}: return {{'role': 'user', 'content': TEXT}}, both "
                "strings."
            )
    return [dict(_text(f"messages()[{number}]", message)) for number, message in enumerate(said)]


def step_of(said: Any, last: bool = False) -> StepResult:
    """An answer with its reward a float and its info what JSON holds; last: of `finish`.

    Raises ValueError for what is no such answer.
    """
    where = "finish()" if last else "step()"
    if not isinstance(said, StepResult):
        raise ValueError(
            f"{where} returned {shown(said)}: return StepResult(observation=TEXT), or "
            "StepResult(done=True, reward=NUMBER)."
        )
    if not last and not isinstance(said.done, bool) and type(said.done).__name__ not in ("bool_", "bool"):
        raise ValueError(f"{where} returned done={shown(said.done)}: give True or False.")
    if not isinstance(said.observation, str):
        raise ValueError(
            f"{where} returned observation={shown(said.observation)}: give a string ('' when done)."
        )
    _text(f"{where} observation", said.observation)
    done = bool(said.done)
    if last and not done:
        raise ValueError("finish() returned done=False: give StepResult(done=True, reward=NUMBER).")
    reward = number_of(f"{where} returned reward", said.reward) if done else None
    if not isinstance(said.info, Mapping):
        raise ValueError(f"{where} returned info={shown(said.info)}: give a dict, {{}} for none.")
    info = {key: _plain(value) for key, value in said.info.items()}
    for key, value in info.items():
        if not isinstance(key, str):
            raise ValueError(
                f"{where} returned info with the key {shown(key)}: name what you record by strings."
            )
        _text(f"{where} returned info[{key!r}]", value)
    return StepResult(observation=said.observation, done=done, reward=reward, info=info)


def number_of(what: str, value: Any) -> float:
    """A finite float of a number, one of NumPy's or torch's included. Raises ValueError for anything else."""
    plain = _plain(value)
    remedy = "give a finite number, as in StepResult(done=True, reward=1.0)"
    if not isinstance(plain, (int, float)):
        raise ValueError(f"{what}={shown(value)}: {remedy}.")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what}={shown(value)}, which would make every weight it trains NaN: {remedy}.")
    return number


def shown(value: Any) -> str:
    """A value and its type, in a message."""
    try:
        text = repr(value)
    except Exception as error:  # whatever a repr of the user's raises
        text = f"<its repr raised {type(error).__name__}>"
    return f"{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''} ({type(value).__name__})"


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's; everything else as it is."""
    if type(value).__module__.split(".")[0] not in ("numpy", "torch"):
        return value
    single = getattr(value, "shape", None) == ()
    return value.item() if single and hasattr(value, "item") else value


def _text(where: str, value: Any) -> Any:
    """The value, which JSON in UTF-8 holds. Raises ValueError."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds half a surrogate pair, {error.object[error.start : error.end]!r}, which is no "
            "text: decode bytes with errors='replace'."
        ) from None
    except (TypeError, ValueError, RecursionError):
        raise ValueError(
            f"{where}={shown(value)}: give what JSON can hold: finite numbers, strings, lists, dicts."
        ) from None
    return value
