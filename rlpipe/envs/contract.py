"""Checks the values that an environment returns, for both rehearsals and rollouts.

Numbers of NumPy and torch become Python numbers, although neither library is imported. Any other violation of
`envs.base` raises an error with the method, the returned value and a hint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlpipe.envs.base import StepResult

_SHOWN = 120  # maximum number of characters of a value in a message
_MAX_INFO = 64_000  # maximum number of recorded characters of an info
_OPENING = ("system", "user", "assistant", "tool")  # roles of opening messages
_OBSERVED = ("user", "tool", "system")  # roles of observations
_RETURN = "return an observation (a string), a reward (a number, which ends the episode), or StepResult(...)"
_RETURN_LAST = "return a reward or StepResult(done=True, reward=NUMBER)"


def messages_of(returned: object) -> list[dict[str, Any]]:
    """Return the opening messages as dicts. Raises ValueError unless given a list of chat messages."""
    if not isinstance(returned, (list, tuple)) or not returned:
        raise ValueError(
            f"messages() returned {shown(returned)}: return a list like "
            "[{'role': 'user', 'content': 'question'}], with one message or more."
        )

    messages = _messages("messages()", returned, _OPENING)
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"messages()[{len(messages) - 1}] is {shown(messages[-1])}: the model writes the next assistant "
            "message, so end with another role, such as user."
        )
    return messages


def step_of(returned: object, *, last: bool = False, rehearsed: bool = False) -> StepResult:
    """Convert a returned value to a StepResult with a float reward and JSON values as its info.

    A number becomes the reward of a last step; a text becomes an observation. last: the value comes from
    `finish`. rehearsed: raise for an info that is too long to be recorded, instead of cutting it.
    Raises ValueError for a value that `envs.base` does not allow.
    """
    where = "finish()" if last else "step()"
    plain = _plain(returned)
    if isinstance(plain, (int, float)):
        returned = StepResult(done=True, reward=plain)
    elif isinstance(returned, str) and not last:
        returned = StepResult(observation=returned)
    if not isinstance(returned, StepResult):
        raise ValueError(f"{where} returned {shown(returned)}: {_RETURN_LAST if last else _RETURN}.")

    truncated = _flag(where, "truncated", returned.truncated)
    done = _flag(where, "done", returned.done) or truncated
    if last and not done:
        raise ValueError("finish() returned done=False: give StepResult(done=True, reward=NUMBER).")

    observation = _observation(where, returned.observation)

    # A step that does not end the episode needs no reward.
    reward = None
    if done or returned.reward is not None:
        reward = number_of(f"{where} returned reward", returned.reward)

    if not isinstance(returned.info, Mapping):
        raise ValueError(f"{where} returned info={shown(returned.info)}: give a dict, {{}} for none.")

    info = recorded_info(where, returned.info, cuts=not rehearsed)
    return StepResult(observation=observation, done=done, reward=reward, truncated=truncated, info=info)


def observation_text(observation: str | Sequence[Mapping[str, Any]]) -> str:
    """Return an observation as one text that a person can read."""
    return observation if isinstance(observation, str) else "\n\n".join(m["content"] for m in observation)


def group_rewards(returned: Any, count: int) -> list[float]:
    """Return the rewards of a group as floats. Raises ValueError unless there are `count` finite numbers."""
    is_list = isinstance(returned, (list, tuple)) or hasattr(returned, "tolist")
    rewards = list(returned) if is_list else []
    if len(rewards) != count:
        raise ValueError(
            f"score_group() returned {shown(returned)} for {count} results: return a list with a reward for "
            "each, in their order."
        )
    return [number_of(f"score_group()[{n}]", reward) for n, reward in enumerate(rewards)]


def number_of(
    what: str, value: object, hint: str = "give a finite number, as in StepResult(done=True, reward=1.0)"
) -> float:
    """Convert a number of Python, NumPy or torch to a finite float. Raises ValueError for anything else."""
    plain = _plain(value)
    if not isinstance(plain, (int, float)):
        raise ValueError(f"{what}={shown(value)}: {hint}.")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf

    if not math.isfinite(number):
        raise ValueError(f"{what}={shown(value)}, which would make every weight it trains NaN: {hint}.")
    return number


def shown(value: object) -> str:
    """Format a value and its type for a message."""
    try:
        text = repr(value)
    except Exception as error:  # the `__repr__` of a user's class may raise anything
        text = f"<its repr raised {type(error).__name__}>"
    return f"{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''} ({type(value).__name__})"


def _messages(where: str, returned: Sequence[Any], roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages as dicts. Raises ValueError for a message without text or with another role."""
    for number, message in enumerate(returned):
        is_valid = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not is_valid:
            raise ValueError(
                f"{where}[{number}] is {shown(message)}: return {{'role': 'user', 'content': TEXT}}, both "
                "strings."
            )
        if message["role"] not in roles:
            raise ValueError(
                f"{where}[{number}] has the role {message['role']!r}: use one of {', '.join(roles)}."
            )

    return [dict(recordable(f"{where}[{number}]", message)) for number, message in enumerate(returned)]


def _observation(where: str, returned: object) -> str | list[dict[str, Any]]:
    """Return a text, or a list of messages. Raises ValueError for anything else."""
    where = f"{where} observation"
    if isinstance(returned, str):
        return recordable(where, returned)
    if not isinstance(returned, (list, tuple)):
        raise ValueError(
            f"{where}={shown(returned)}: give a string ('' when done), or chat messages as in "
            "[{'role': 'tool', 'content': TEXT}]."
        )
    return _messages(where, returned, _OBSERVED)


def recorded_info(where: str, info: Mapping[Any, Any], *, cuts: bool) -> dict[str, Any]:
    """Return an info as it will be recorded, after checking that it can be written as JSON.

    cuts: shorten values that are too long instead of raising. Raises ValueError for values that JSON cannot
    represent.
    """
    recorded: dict[str, Any] = {}
    left = _MAX_INFO
    for key, value in info.items():
        if not isinstance(key, str):
            raise ValueError(
                f"{where} returned info with the key {shown(key)}: name what you record by strings."
            )
        recorded[key] = plain = recordable(f"{where} returned info[{key!r}]", _plain(value))

        # Numbers are never cut: they are short and become metrics.
        if isinstance(plain, (int, float)):
            continue
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        if len(text) > left:
            if not cuts:
                raise ValueError(
                    f"{where} returned info of which {key!r} has {len(text)} characters: every trajectory "
                    f"records it, so give at most {_MAX_INFO} in all (a longer one is cut)."
                )
            recorded[key] = text = f"{text[:_SHOWN]}... ({len(text)} characters, cut)"
        left -= len(text)
    return recorded


def _flag(where: str, name: str, value: object) -> bool:
    """Return a boolean. Raises ValueError for anything else."""
    # The booleans of NumPy and torch are not instances of `bool`.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise ValueError(f"{where} returned {name}={shown(value)}: give True or False.")
    return bool(value)


def _plain(value: Any) -> Any:
    """Convert a number of NumPy or torch to a Python number; return anything else unchanged."""
    if type(value).__module__.split(".")[0] not in ("numpy", "torch"):
        return value
    single = getattr(value, "shape", None) == ()
    return value.item() if single and hasattr(value, "item") else value


def recordable(where: str, value: object) -> Any:
    """Return the value unchanged if UTF-8 JSON can represent it. Raises ValueError otherwise."""
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
