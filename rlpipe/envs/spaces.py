"""Gymnasium's spaces as text: the text of an observation, and the action that an answer names.

    describe(space)           what an answer must be         "one of left, down, right, up"
    to_text(space, value)     an observation                 "3", "0.12 -1.5", "cards: 17"
    to_action(space, text)    an action; a ValueError with the expected format when the text names none

Supports Discrete (by name where names are known), MultiDiscrete, MultiBinary, small Box and Text. Also
supports Dict and Tuple of these spaces, nested or not; each part has one line. Gymnasium is not imported: the
class name of a space identifies its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

MAX_NUMBERS = 64  # maximum size of a Box or MultiDiscrete; larger ones are images or feature vectors
# Names of the actions in Gymnasium's documentation.
ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
}
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def check_space(space: Any, where: str) -> None:
    """Raise ValueError for a space that has no text format.

    where: "observation" or "action", for the message.
    """
    for _, part, _ in _parts(space):
        if _kind(part) not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
            raise ValueError(f"its {where} space is {part}, which has no text: wrap it in one that has.")
        if (count := np.prod(part.shape or 1)) > MAX_NUMBERS:
            raise ValueError(
                f"its {where} space {part} has {count} numbers, above {MAX_NUMBERS}, which a model cannot "
                "read as text: wrap it in one with fewer."
            )


def action_names(env: Any, given: Sequence[str]) -> Sequence[str]:
    """Return names for the actions of a Discrete space; empty if there are none.

    Uses `given` if not empty, else the environment's names, else known names. Raises ValueError if the number
    of given names is not the number of actions.
    """
    size = getattr(env.action_space, "n", 0)
    if given and len(given) != size:
        raise ValueError(f"env.gymnasium.actions={list(given)} has {len(given)} names for {size} actions.")

    known = ACTION_NAMES.get(env.spec.name if env.spec else "", ())
    own = getattr(env.unwrapped, "get_action_meanings", lambda: known)()
    return given or (own if len(own) == size else ())


def describe(space: Any, names: Sequence[str] = ()) -> str:
    """Describe the expected format of an answer. names: names of a Discrete space's actions, in order."""
    return ", then ".join(label + _described(part, names) for label, part, _ in _parts(space))


def to_text(space: Any, value: object) -> str:
    """Format an observation: numbers with four digits, each part of a Dict or Tuple on a separate line."""
    return "\n".join(
        label + (part if isinstance(part, str) else " ".join(f"{number:.4g}" for number in np.ravel(part)))
        for label, _, part in _parts(space, value)
    )


def to_action(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """Return the action that an answer names.

    Raises ValueError with a text for the model if the answer names none.
    """
    parts = _parts(space)
    lines = [line.strip() for line in text.splitlines() if line.strip()] if len(parts) > 1 else [text]
    if len(lines) != len(parts):
        raise ValueError(f"Answer in {len(parts)} lines: {describe(space)}.")
    answers = (line.removeprefix(label.strip()) for (label, _, _), line in zip(parts, lines, strict=True))
    return _action(space, answers, names)


def _action(space: Any, lines: Iterator[str], names: Sequence[str]) -> Any:
    """Parse an action from the next lines, one line per part. Raises ValueError if a line names none."""
    if _kind(space) == "Dict":
        return {key: _action(part, lines, names) for key, part in space.spaces.items()}
    if _kind(space) == "Tuple":
        return tuple(_action(part, lines, names) for part in space.spaces)

    text, action = next(lines), None
    if _kind(space) == "Text":
        action = text.strip()
    elif _kind(space) == "Discrete":
        action = _named(text, names, space)
    elif len(numbers := [float(number) for number in _NUMBER.findall(text)]) == np.prod(space.shape):
        wanted = np.array(numbers).reshape(space.shape)
        # Reject values that the dtype would change: 1.7 is not an integer, and 300 is not a byte.
        action = same if np.allclose(same := wanted.astype(space.dtype), wanted) else None

    if action is None or action not in space:
        raise ValueError(f"Answer with {_described(space, names)}.")
    return action


def _named(text: str, names: Sequence[str], space: Any) -> np.int64 | None:
    """Return the action named in the text as a separate word; None unless exactly one is named.

    Without names, the words are the actions' numbers.
    """
    words = names or [str(number) for number in range(space.start, space.start + space.n)]
    lowered = [word.lower() for word in words]
    any_word = "|".join(map(re.escape, lowered))
    found = set(re.findall(rf"(?<![\w.-])(?:{any_word})(?!\w|\.\d)", text.lower()))
    return np.int64(space.start + lowered.index(found.pop())) if len(found) == 1 else None


def _described(space: Any, names: Sequence[str]) -> str:
    """Describe the expected answer for a space that has a single part."""
    if names:
        return f"one of {', '.join(names)}"
    if _kind(space) == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"

    if _kind(space) == "Box":
        bounds = space.low, space.high
    else:
        low, most = getattr(space, "start", 0), 1 if _kind(space) == "MultiBinary" else None
        bounds = low, low + (most or getattr(space, "nvec", getattr(space, "n", 0)) - 1)
    pairs = zip(*(np.broadcast_to(end, space.shape).ravel() for end in bounds), strict=True)
    each = [f"{low:.4g} to {high:.4g}" for low, high in pairs]
    return f"{len(each)} numbers ({', '.join(each)})" if len(each) > 1 else f"a number from {each[0]}"


def _kind(space: Any) -> str:
    return type(space).__name__


def _parts(space: Any, value: Any = None, label: str = "") -> list[tuple[str, Any, Any]]:
    """Return label, space and value of each part of nested Dict and Tuple spaces; a Tuple adds no label."""
    if _kind(space) == "Dict":
        inner = [(f"{label}{key}: ", part, value and value[key]) for key, part in space.spaces.items()]
    elif _kind(space) == "Tuple":
        inner = [(label, part, value and value[index]) for index, part in enumerate(space.spaces)]
    else:
        return [(label, space, value)]
    return [leaf for label, part, value in inner for leaf in _parts(part, value, label)]
