"""Gymnasium's spaces as text: what a model reads of an observation, and the action that its answer names.

    describe(space)           what an answer must be         "one of left, down, right, up"
    to_text(space, value)     an observation                 "3", "0.12 -1.5", "cards: 17"
    to_action(space, text)    an action; ValueError, with what to answer instead, when the text names none

Owns Discrete (by name where names are known), MultiDiscrete, MultiBinary, small Box, Text, and Dict and Tuple
of those. Imports no Gymnasium: the name of its class identifies the space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_NUMBERS = 64  # of a Box or MultiDiscrete: more is an image or a feature vector, which no model reads
# Names that Gymnasium's documents give the actions.
ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
}
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def check_space(space: Any, where: str) -> None:
    """Raise ValueError for a space that has no text. where: "observation" or "action", for the message."""
    parts = _parts(space)
    for _, part in parts:
        check_space(part, where)

    if not parts and _kind(space) not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
        raise ValueError(f"its {where} space is {space}, which has no text: wrap it in one that has.")
    if not parts and (count := np.prod(space.shape or 1)) > MAX_NUMBERS:
        raise ValueError(
            f"its {where} space {space} has {count} numbers, above {MAX_NUMBERS}, which a model cannot read "
            "as text: wrap it in one with fewer."
        )


def action_names(env: Any, given: Sequence[str]) -> Sequence[str]:
    """Return the names of the actions of a Discrete space: those given, the environment's, or known ones.

    Empty when there are none. Raises ValueError when as many are not given as there are actions.
    """
    size = getattr(env.action_space, "n", 0)
    if given and len(given) != size:
        raise ValueError(f"env.gymnasium.actions={list(given)} has {len(given)} names for {size} actions.")

    known = ACTION_NAMES.get(env.spec.name if env.spec else "", ())
    own = getattr(env.unwrapped, "get_action_meanings", lambda: known)()
    return given or (own if len(own) == size else ())


def describe(space: Any, names: Sequence[str] = ()) -> str:
    """Say what an answer must be. names: of the actions of a Discrete space, in order."""
    if parts := _parts(space):
        return ", then ".join(label + describe(part) for label, part in parts)
    if names:
        return f"one of {', '.join(names)}"
    if _kind(space) == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    each = [f"{low:.4g} to {high:.4g}" for low, high in zip(*_bounds(space), strict=True)]
    return f"{len(each)} numbers ({', '.join(each)})" if len(each) > 1 else f"a number from {each[0]}"


def to_text(space: Any, value: Any) -> str:
    """Write an observation: numbers with four digits, the parts of a Dict or Tuple on lines of their own."""
    if parts := _parts(space):
        values = [value[key] for key in space.spaces] if _kind(space) == "Dict" else value
        pairs = zip(parts, values, strict=True)
        return "\n".join(label + to_text(part, one) for (label, part), one in pairs)
    return value if isinstance(value, str) else " ".join(f"{number:.4g}" for number in np.ravel(value))


def to_action(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """Return the action that an answer names. Raises ValueError, a text for the model, when it names none."""
    if parts := _parts(space):
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) != len(parts):
            raise ValueError(f"Answer in {len(parts)} lines: {describe(space)}.")
        actions = [to_action(part, line) for (_, part), line in zip(parts, lines, strict=True)]
        is_dict = _kind(space) == "Dict"
        return dict(zip(space.spaces, actions, strict=True)) if is_dict else tuple(actions)

    hint = f"Answer with {describe(space, names)}."
    if _kind(space) == "Text":
        action: Any = text.strip()
    elif _kind(space) == "Discrete":
        action = _named(text, names, space)
    else:
        numbers = [float(number) for number in _NUMBER.findall(text)]
        if len(numbers) != np.prod(space.shape):
            raise ValueError(hint)
        wanted = np.array(numbers).reshape(space.shape)
        action = wanted.astype(space.dtype)
        # 1.7 is no integer and 300 no byte: a conversion must not make another action of them.
        action = action if np.allclose(action, wanted) else None

    if action is None or action not in space:
        raise ValueError(hint)
    return action


def _named(text: str, names: Sequence[str], space: Any) -> np.int64 | None:
    """Return the one action whose name, or number when there are no names, is in the text as a word."""
    words = names or [str(number) for number in range(space.start, space.start + space.n)]
    lowered = [word.lower() for word in words]
    any_word = "|".join(map(re.escape, lowered))
    found = set(re.findall(rf"(?<![\w.-])(?:{any_word})(?!\w|\.\d)", text.lower()))
    return np.int64(space.start + lowered.index(found.pop())) if len(found) == 1 else None


def _bounds(space: Any) -> list[np.ndarray]:
    """Return the smallest and the largest value of each number of a space."""
    if _kind(space) == "Box":
        ends = space.low, space.high
    else:
        low, is_binary = getattr(space, "start", 0), _kind(space) == "MultiBinary"
        ends = low, low + (1 if is_binary else getattr(space, "nvec", getattr(space, "n", 0)) - 1)
    return [np.broadcast_to(end, space.shape).ravel() for end in ends]


def _kind(space: Any) -> str:
    return type(space).__name__


def _parts(space: Any) -> list[tuple[str, Any]]:
    """Return the parts of a Dict or Tuple space with their labels; those of a Tuple have none."""
    if _kind(space) == "Dict":
        return [(f"{key}: ", part) for key, part in space.spaces.items()]
    return [("", part) for part in space.spaces] if _kind(space) == "Tuple" else []
