"""A setting with a fixed set of values, written the way people write it: `cluster.mode=ray`.

OmegaConf reads and prints enum members by their Python name (`RAY`). A Choice goes by its value in every
place that OmegaConf looks: reading, printing and the list of what is possible in its errors.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Any


class _ByValue(enum.EnumType):
    """`Mode["token-mean"]` and `Mode.__members__` go by value."""

    def __getitem__(cls, value: str) -> Any:
        try:
            return cls(value)
        except ValueError:
            raise KeyError(value) from None

    @property
    def __members__(cls) -> MappingProxyType[str, Any]:
        return MappingProxyType({member.value: member for member in cls})


class Choice(enum.StrEnum, metaclass=_ByValue):
    """Base of the enums in the configuration.

    >>> class Mode(Choice):
    ...     OFF = "off"
    >>> Mode["off"] is Mode.OFF, Mode.OFF.name, f"{Mode.OFF}"
    (True, 'off', 'off')
    """

    @enum.property
    def name(self) -> str:
        """The value: what a user writes."""
        return self._value_
