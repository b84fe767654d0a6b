"""Enums with values that users type: `spec.mode=rejection`, not `spec.mode=REJECTION`.

OmegaConf reads and prints enums by member name, but a `Choice` by its value. Code uses the member names as
constants (`SpecMode.REJECTION`).
"""

from __future__ import annotations

import enum


class _ByValue(enum.EnumMeta):
    """Metaclass that looks members up by their values."""

    @property
    def __members__(cls) -> dict[str, enum.Enum]:
        """Return the members by their values, so that error messages list the values."""
        return {member.value: member for member in cls}

    def __getitem__(cls, name: str) -> enum.Enum:
        """Return the member with this value, or with this member name (for OmegaConf and pickles)."""
        try:
            return cls(name)
        except ValueError:
            return super().__getitem__(name)


class Choice(enum.StrEnum, metaclass=_ByValue):
    """A setting with named alternatives.

    >>> class Colour(Choice):
    ...     RED = "red"
    >>> Colour["red"] is Colour["RED"] is Colour.RED, Colour.RED.name
    (True, 'red')
    """

    @enum.property
    def name(self) -> str:
        """The value, which YAML and messages display."""
        return str(self._value_)
