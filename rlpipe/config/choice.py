"""Enums with values that users type: `spec.mode=rejection`, not `spec.mode=REJECTION`.

OmegaConf reads and prints enums by member name; a `Choice` is read and printed by its value. Member
names stay constants for code (`SpecMode.REJECTION`).
"""

from __future__ import annotations

import enum


class _ByValue(enum.EnumMeta):
    """Metaclass that looks members up by their values."""

    @property
    def __members__(cls) -> dict[str, enum.Enum]:
        """Return the members by value, which error messages list."""
        return {member.value: member for member in cls}

    def __getitem__(cls, name: str) -> enum.Enum:
        """Return the member of that value, or of that name, which OmegaConf and pickles use."""
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
