"""Values that carry a full distribution: `Histogram` (bounds known beforehand), `Sketch` (any quantile).

Owns their merge and their form in a record. Both merge by adding counts, so a merged result is the same as
if one process had counted all observations, in any order. The flow is described in values.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, isfinite, isnan, log, nan


@dataclass(slots=True)
class Histogram:
    """Counts between fixed bounds.

    edges: n + 1 ascending bounds. Bin i holds edges[i] <= x < edges[i + 1]; the last bin includes edges[n].
    counts: n counts. Observations outside the bounds count in the first or last bin.
    """

    edges: tuple[float, ...]
    counts: list[float]

    def __post_init__(self) -> None:
        self.edges = tuple(map(float, self.edges))
        if len(self.edges) != len(self.counts) + 1 or sorted(set(self.edges)) != list(self.edges):
            raise ValueError(
                f"a histogram needs ascending edges, one more than counts; received {len(self.edges)} edges "
                f"{self.edges} for {len(self.counts)} counts."
            )

    @classmethod
    def of(cls, observations: Iterable[float | None], edges: Sequence[float]) -> Histogram:
        """Count plain observations; None entries do not count.

        >>> Histogram.of([0, 1, 1, 2, 9], edges=[0, 1, 2, 3]).counts
        [1.0, 2.0, 2.0]
        """
        counts = [0.0] * (len(edges) - 1)
        for x in observations:
            if x is not None:
                counts[min(max(bisect_right(edges, x) - 1, 0), len(counts) - 1)] += 1
        return cls(tuple(edges), counts)

    def merge(self, other: Histogram) -> Histogram:
        """Add the counts of two histograms. Raises ValueError when the bounds differ."""
        if self.edges != other.edges:
            raise ValueError(
                f"cannot merge histograms with edges {self.edges} and {other.edges}. Fix the edges where the "
                "metric is emitted, or emit a Sketch."
            )

        return Histogram(self.edges, [a + b for a, b in zip(self.counts, other.counts, strict=True)])

    def value(self) -> dict[str, list[float]] | None:
        """Return {"edges": [n + 1], "counts": [n]}; None without observations."""
        return {"edges": list(self.edges), "counts": list(self.counts)} if any(self.counts) else None


SKETCH_ERROR = 0.01  # relative error
_LOG_GAMMA = log((1 + SKETCH_ERROR) / (1 - SKETCH_ERROR))
SKETCH_TINY = 1e-9  # smaller absolute values count as zero
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
SKETCH_PARTS = ("count", "mean", "min", *QUANTILES, "max")


@dataclass(slots=True)
class Sketch:
    """Quantiles of any numbers, within 1% of the true value (DDSketch: Masson, Rim, Lee 2019, Section 2).

    x > 0 falls in bin i = ceil(log x / log g), where g = (1 + e) / (1 - e). The bin's estimate,
    2 g^i / (g + 1), differs from x by at most e x. Merging adds the counts of equal bins, so it is exact in
    any order.

    positive, negative: counts by bin of |x|. zeros: count of |x| <= SKETCH_TINY. broken: count of NaN and
    infinities.
    """

    count: float = 0.0
    total: float = 0.0
    min: float | None = None
    max: float | None = None
    zeros: float = 0.0
    broken: float = 0.0
    positive: dict[int, float] = field(default_factory=dict)
    negative: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, observations: Iterable[float | None]) -> Sketch:
        """Build the sketch of plain observations; None entries do not count.

        >>> sketch = Sketch.of(range(1, 101))
        >>> sketch.quantile(0.5), sketch.value()["p90"], sketch.value()["max"]
        (49.90296094906653, 89.13032933635915, 100.0)
        """
        seen = [float(x) for x in observations if x is not None]
        finite = [x for x in seen if isfinite(x)]

        sketch = cls(
            count=float(len(seen)),
            total=sum(seen),
            min=extreme(seen, min),
            max=extreme(seen, max),
            broken=float(len(seen) - len(finite)),
        )

        for x in finite:
            if abs(x) <= SKETCH_TINY:
                sketch.zeros += 1
            else:
                # Bins widen with |x|, so that the relative error is the same everywhere.
                bins, n = sketch.positive if x > 0 else sketch.negative, ceil(log(abs(x)) / _LOG_GAMMA)
                bins[n] = bins.get(n, 0) + 1

        return sketch

    def merge(self, other: Sketch) -> Sketch:
        """Add the counts of two sketches."""
        return Sketch(
            count=self.count + other.count,
            total=self.total + other.total,
            min=extreme((self.min, other.min), min),
            max=extreme((self.max, other.max), max),
            zeros=self.zeros + other.zeros,
            broken=self.broken + other.broken,
            positive=_added(self.positive, other.positive),
            negative=_added(self.negative, other.negative),
        )

    def quantile(self, q: float) -> float | None:
        """Return the value below which a share q of the finite observations is; None if there are none."""
        finite = self.count - self.broken
        if not finite:
            return None

        # Walk the bins from the most negative to the largest until the rank is used up.
        rank = q * (finite - 1)
        ascending = [(-_middle(n), count) for n, count in sorted(self.negative.items(), reverse=True)]
        ascending += [(0.0, self.zeros)]
        ascending += [(_middle(n), count) for n, count in sorted(self.positive.items())]

        for middle, count in ascending:
            rank -= count
            if rank < 0:
                return middle
        return ascending[-1][0]

    def value(self) -> dict[str, float | None] | None:
        """Return the SKETCH_PARTS by name, stored as `name/part` in a record; None without observations."""
        if not self.count:
            return None
        return {
            "count": self.count,
            "mean": self.total / self.count,
            "min": self.min,
            **{part: self.quantile(q) for part, q in QUANTILES.items()},
            "max": self.max,
        }


def _middle(n: int) -> float:
    """Return the estimate of bin n: the number with equal relative distance to both bounds."""
    return 2 / (exp(_LOG_GAMMA) + 1) * exp(n * _LOG_GAMMA)


def extreme(observations: Iterable[float | None], pick: Callable[..., float | None]) -> float | None:
    """Return the min or max of the observations; NaN if one is NaN, None if there are none."""
    seen = [float(x) for x in observations if x is not None]

    # If one is NaN, the result of max() and min() would depend on the order.
    if any(isnan(x) for x in seen):
        return nan
    return pick(seen, default=None)


def _added(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    return {n: a.get(n, 0.0) + b.get(n, 0.0) for n in a.keys() | b.keys()}
