"""Limits of single settings, each refused in one wording. Imports no torch."""

from __future__ import annotations

from typing import Any


def at_least(least: float, settings: Any, section: str, *names: str, remedy: str = "") -> None:
    """Raises ValueError unless the named fields of a section are `least` or more."""
    for name in names:
        if getattr(settings, name) < least:
            _refuse(settings, section, name, f"must be at least {least}", remedy)


def positive(settings: Any, section: str, *names: str, remedy: str = "") -> None:
    """Raises ValueError unless the named fields of a section are above 0."""
    for name in names:
        if getattr(settings, name) <= 0:
            _refuse(settings, section, name, "must be positive", remedy)


def share(settings: Any, section: str, *names: str) -> None:
    """Raises ValueError unless the named fields of a section lie in 0..1."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            _refuse(settings, section, name, "must be a share from 0 to 1", "")


def learning_rates(settings: Any, section: str) -> None:
    """Raises ValueError unless 0 <= min_lr <= lr."""
    if not 0 <= settings.min_lr <= settings.lr:
        raise ValueError(f"{section}.min_lr={settings.min_lr} must lie in 0..{section}.lr={settings.lr}.")


def _refuse(settings: Any, section: str, name: str, limit: str, remedy: str) -> None:
    value = getattr(settings, name)
    raise ValueError(f"{section}.{name}={value} {limit}{f': {remedy}' if remedy else ''}.")
