"""Opponents in two-player games: random legal moves, or a user's function."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from rlpipe.config.user_code import load_function
from rlpipe.envs.rehearsal import call

Opponent = Callable[[str, random.Random], str]
_MOVES = re.compile(r"(?:available|valid|legal) (?:moves|actions)\b[^:\n]*:(.*)", re.IGNORECASE)


def load_opponent(name: str, *, setting: str) -> Opponent | None:
    """Return the opponent that a setting names; None for "". Raises ValueError if it cannot be loaded."""
    if name in ("", "random"):
        return choose_at_random if name else None
    return load_function(name, setting=setting, takes="text, rng")


def check_opponent(opponent: Opponent, text: str, where: str) -> None:
    """Let an opponent move once. text: the game's text. Raises ValueError with file and line if it fails."""
    call(where, _a_text, opponent, text, random.Random(0))


def choose_at_random(text: str, rng: random.Random) -> str:
    """Return a random move from the last list of moves in brackets. Raises ValueError if there is none.

    >>> choose_at_random("Available Moves: '[3]'", random.Random(0))
    '[3]'
    """
    listed = [moves for line in _MOVES.findall(text) if (moves := re.findall(r"\[[^\]\n]+\]", line))]
    if not listed:
        raise ValueError("this game lists no legal moves, which 'random' needs: name a function instead.")
    return rng.choice(listed[-1])


def _a_text(move: object) -> object:
    if not isinstance(move, str):
        raise ValueError(f"the opponent returned {move!r}: return its move as a text, such as '[4]'.")
    return move
