"""Checks of single settings against limits, with the same message for each kind. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def did_you_mean(given: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return a space and a sentence with at most `most` of the closest known names; empty if none is close.

    >>> did_you_mean("rejecton", ["rejection", "none"])
    ' Did you mean rejection?'
    """
    close = get_close_matches(given, list(known), n=most)
    return f" Did you mean {', '.join(close)}?" if close else ""


def at_least(least: float, settings: object, section: str, *names: str, remedy: str = "") -> None:
    """Refuse named fields of a section that are below `least`. Raises ValueError; remedy: a hint."""
    for name in names:
        if getattr(settings, name) < least:
            _refuse(settings, section, name, f"must be at least {least}", remedy)


def positive(settings: object, section: str, *names: str, remedy: str = "") -> None:
    """Refuse named fields of a section that are not above 0. Raises ValueError; remedy: a hint."""
    for name in names:
        if getattr(settings, name) <= 0:
            _refuse(settings, section, name, "must be positive", remedy)


def share(settings: object, section: str, *names: str) -> None:
    """Refuse named fields of a section that are outside 0..1. Raises ValueError."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            _refuse(settings, section, name, "must be a share from 0 to 1", "")


def learning_rates(settings: Any, section: str) -> None:
    """Refuse learning rates unless 0 <= min_lr <= lr. Raises ValueError."""
    if not 0 <= settings.min_lr <= settings.lr:
        raise ValueError(f"{section}.min_lr={settings.min_lr} must lie in 0..{section}.lr={settings.lr}.")


def _refuse(settings: object, section: str, name: str, limit: str, remedy: str) -> None:
    """Raise ValueError for a field that violates a limit."""
    value = getattr(settings, name)
    raise ValueError(f"{section}.{name}={value} {limit}{f': {remedy}' if remedy else ''}.")
