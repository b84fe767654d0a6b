"""What an environment may return: checked in one place, for rehearsals and for rollouts alike.

Numbers of NumPy and torch become Python numbers. Any other departure from `envs.base` raises an error with
the method, the value it returned and a hint. Loads neither library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlpipe.envs.base import StepResult

_SHOWN = 120  # characters of a value in a message


def messages_of(returned: Any) -> list[dict[str, Any]]:
    """Return the opening messages. Raises ValueError for anything that is not a list of chat messages."""
    if not isinstance(returned, (list, tuple)) or not returned:
        raise ValueError(
            f"messages() returned {shown(returned)}: return a list like "
            "[{'role': 'user', 'content': 'question'}], with one message or more."
        )

    for number, message in enumerate(returned):
        is_valid = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not is_valid:
            raise ValueError(
                f"messages()[{number}] is {shown(message)}: return {{'role': 'user', 'content': TEXT}}, both "
                "strings."
            )

    return [dict(_text(f"messages()[{number}]", message)) for number, message in enumerate(returned)]


def step_of(returned: Any, *, last: bool = False) -> StepResult:
    """Return the result with its reward as a float and its info as JSON values.

    last: the result is of `finish`. Raises ValueError for anything that `envs.base` does not allow.
    """
    where = "finish()" if last else "step()"
    if not isinstance(returned, StepResult):
        raise ValueError(
            f"{where} returned {shown(returned)}: return StepResult(observation=TEXT), or "
            "StepResult(done=True, reward=NUMBER)."
        )

    # NumPy and torch have booleans of their own, which are no `bool`.
    if (
        not last
        and not isinstance(returned.done, bool)
        and type(returned.done).__name__ not in ("bool_", "bool")
    ):
        raise ValueError(f"{where} returned done={shown(returned.done)}: give True or False.")

    if not isinstance(returned.observation, str):
        raise ValueError(
            f"{where} returned observation={shown(returned.observation)}: give a string ('' when done)."
        )
    _text(f"{where} observation", returned.observation)

    done = bool(returned.done)
    if last and not done:
        raise ValueError("finish() returned done=False: give StepResult(done=True, reward=NUMBER).")

    reward = number_of(f"{where} returned reward", returned.reward) if done else None

    if not isinstance(returned.info, Mapping):
        raise ValueError(f"{where} returned info={shown(returned.info)}: give a dict, {{}} for none.")

    info = {key: _plain(value) for key, value in returned.info.items()}

    # Checked now, so that the records of the run can be written later.
    for key, value in info.items():
        if not isinstance(key, str):
            raise ValueError(
                f"{where} returned info with the key {shown(key)}: name what you record by strings."
            )
        _text(f"{where} returned info[{key!r}]", value)

    return StepResult(observation=returned.observation, done=done, reward=reward, info=info)


def number_of(what: str, value: Any) -> float:
    """Return a number, one of NumPy's or torch's included, as a finite float. Raises ValueError otherwise."""
    plain = _plain(value)
    hint = "give a finite number, as in StepResult(done=True, reward=1.0)"

    if not isinstance(plain, (int, float)):
        raise ValueError(f"{what}={shown(value)}: {hint}.")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf

    if not math.isfinite(number):
        raise ValueError(f"{what}={shown(value)}, which would make every weight it trains NaN: {hint}.")
    return number


def shown(value: Any) -> str:
    """Format a value and its type for a message."""
    try:
        text = repr(value)
    except Exception as error:  # a repr of the user's code may raise anything
        text = f"<its repr raised {type(error).__name__}>"
    return f"{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''} ({type(value).__name__})"


def _plain(value: Any) -> Any:
    """Convert a number of NumPy or torch to Python's; return anything else unchanged."""
    if type(value).__module__.split(".")[0] not in ("numpy", "torch"):
        return value
    single = getattr(value, "shape", None) == ()
    return value.item() if single and hasattr(value, "item") else value


def _text(where: str, value: Any) -> Any:
    """Return the value if JSON in UTF-8 can hold it. Raises ValueError otherwise."""
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
