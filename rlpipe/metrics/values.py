"""Typed metric values: each carries what its reduction needs, so that the result is exact.

Owns the values and their merge, but no names, steps or sinks. A mean of means is wrong as soon as
the parts differ in size (3 tokens at 1.0 and 1 token at 5.0 average to 2.0, not 3.0), so a `Mean`
is passed on as total and count, and divided once, at the end. Flow: a component returns
`dict[str, Value]`, `reduce` merges the dicts of all actors and micro-batches, `.value()` is read once.

Every merge is associative and, except for `Last`, commutative: the order of the actors does not matter.
Values with a full distribution are in distributions.py.
NaN and infinity are never dropped, so a diverged loss is visible. `None` means "not observed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from rlpipe.metrics.distributions import Histogram, Sketch, extreme


@dataclass(slots=True)
class Mean:
    """Weighted mean: total = Σ w·x, count = Σ w (w = 1 for plain observations)."""

    total: float
    count: float

    def __post_init__(self) -> None:
        self.total, self.count = float(self.total), float(self.count)

    @classmethod
    def of(cls, observations: Iterable[float | None]) -> Mean:
        """Build the mean of plain observations; None entries were not observed and do not count.

        >>> Mean.of([1.0, 1.0, 1.0, 5.0]).value(), Mean.of([]).value()
        (2.0, None)
        """
        seen = [float(x) for x in observations if x is not None]
        return cls(sum(seen), len(seen))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Ratio:
    """Ratio of two sums, divided once: Σ numerator / Σ denominator."""

    numerator: float
    denominator: float

    def __post_init__(self) -> None:
        self.numerator, self.denominator = float(self.numerator), float(self.denominator)

    def merge(self, other: Ratio) -> Ratio:
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)

    def value(self) -> float | None:
        return self.numerator / self.denominator if self.denominator else None


@dataclass(slots=True)
class Sum:
    """A total over actors and micro-batches: tokens, seconds, events."""

    total: float

    def __post_init__(self) -> None:
        self.total = float(self.total)

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(slots=True)
class _Extreme:
    """The largest or smallest observation; None without observations, NaN when one was NaN."""

    end: float | None
    pick: ClassVar[Callable[..., float]]

    def __post_init__(self) -> None:
        self.end = None if self.end is None else float(self.end)

    @classmethod
    def of(cls, observations: Iterable[float | None]) -> Self:
        return cls(extreme(observations, cls.pick))

    def merge(self, other: Self) -> Self:
        return self.of((self.end, other.end))

    def value(self) -> float | None:
        return self.end


class Max(_Extreme):
    """The largest observation."""

    __slots__ = ()
    pick = max


class Min(_Extreme):
    """The smallest observation."""

    __slots__ = ()
    pick = min


@dataclass(slots=True)
class Last:
    """The latest reading of a gauge (learning rate, version): the later emission wins."""

    latest: float | None

    def __post_init__(self) -> None:
        self.latest = None if self.latest is None else float(self.latest)

    def merge(self, other: Last) -> Last:
        return Last(self.latest) if other.latest is None else Last(other.latest)

    def value(self) -> float | None:
        return self.latest


Span = tuple[str, int, str, float, float, dict[str, object]]


@dataclass(slots=True)
class Spans:
    """Spans of time for the trace: (actor, lane, what, begin, end, details); `SpanLog` creates them.

    begin, end: seconds since 1970. Spans go only to sinks with a method `spans`, and never enter a record.
    """

    spans: list[Span]

    def merge(self, other: Spans) -> Spans:
        return Spans(self.spans + other.spans)

    def value(self) -> None:
        return None


Value = Mean | Ratio | Sum | Max | Min | Last | Histogram | Sketch | Spans


def stats(name: str, observations: Iterable[float | None]) -> dict[str, Value]:
    """Return `name/mean`, `name/max` and `name/min` of plain observations; None entries do not count.

    >>> {k: v.value() for k, v in stats("num_turns", [1, 2, 6]).items()}
    {'num_turns/mean': 3.0, 'num_turns/max': 6.0, 'num_turns/min': 1.0}
    """
    seen = list(observations)
    return {f"{name}/mean": Mean.of(seen), f"{name}/max": Max.of(seen), f"{name}/min": Min.of(seen)}


def merge(a: Value, b: Value) -> Value:
    """Merge two values of one metric; `b` is the later one (which matters only for `Last`).

    Raises ValueError when their types differ, because then one of the two emitters has a bug.
    """
    if type(a) is not type(b):
        raise ValueError(
            f"cannot merge {type(a).__name__} with {type(b).__name__}: {a!r} and {b!r} were emitted under "
            "one name. Emit every metric with one type, the kind declared in metrics/catalogue.toml."
        )

    return a.merge(b)  # pyright: ignore[reportArgumentType]  # the types are equal, checked above


def reduce(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    """Merge the metrics of several actors, micro-batches or steps, name by name.

    Raises ValueError, naming the metric, when values of one metric differ in type.

    >>> reduce([{"a": Mean(3, 3)}, {"a": Mean(5, 1), "b": Sum(1)}])["a"].value()
    2.0
    """
    merged: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            # If the types differ, an emitter has a bug; the metric's name shows which emitter.
            try:
                merged[name] = merge(merged[name], value) if name in merged else value
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from None

    return merged
