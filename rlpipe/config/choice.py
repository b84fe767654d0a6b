"""Enums whose values are what a user types: `spec.mode=rejection`, not `spec.mode=REJECTION`.

OmegaConf reads and prints enums by member name; a `Choice` is read and printed by its value. Member
names stay constants for code (`SpecMode.REJECTION`).
"""

from __future__ import annotations

import enum


class _ByValue(enum.EnumMeta):
    @property
    def __members__(cls) -> dict[str, enum.Enum]:
        """Members by value: what an error message lists."""
        return {member.value: member for member in cls}

    def __getitem__(cls, name: str) -> enum.Enum:
        """The member of that value, or of that name (how OmegaConf and pickles ask)."""
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
        """The value: what is shown in YAML and messages."""
        return str(self._value_)
