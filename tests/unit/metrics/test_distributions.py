"""Distributions reduce like one process that saw everything, and say how wrong they may be."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.metrics.distributions import SKETCH_ERROR, SKETCH_TINY, Histogram, Sketch
from rlpipe.metrics.values import merge, reduce

pytestmark = pytest.mark.unit
NUMBERS = st.floats(-1e6, 1e6)
SHARDS = st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=6)
EDGES = [-10.0, -1.0, 0.0, 0.5, 100.0]


@given(SHARDS)
def test_any_sharding_reduces_to_the_whole(shards: list[list[float]]) -> None:
    whole = [x for shard in shards for x in shard]
    got = reduce([{"s": Sketch.of(shard), "h": Histogram.of(shard, EDGES)} for shard in shards])
    alone = Sketch.of(whole)
    assert got["h"] == Histogram.of(whole, EDGES)
    assert (got["s"].positive, got["s"].negative, got["s"].zeros) == (
        alone.positive,
        alone.negative,
        alone.zeros,
    )
    assert (got["s"].count, got["s"].min, got["s"].max) == (alone.count, alone.min, alone.max)
    assert got["s"].total == pytest.approx(alone.total, abs=1e-6)


@given(st.lists(NUMBERS, min_size=1, max_size=80), st.floats(0, 1))
def test_a_quantile_is_within_its_stated_error(values: list[float], q: float) -> None:
    true = sorted(values)[math.floor(q * (len(values) - 1))]
    assert Sketch.of(values).quantile(q) == pytest.approx(true, rel=SKETCH_ERROR * 1.001, abs=SKETCH_TINY)


def test_every_observation_enters_a_histogram_and_bounds_belong_to_the_bin_above() -> None:
    histogram = Histogram.of([-99, 0.0, 0.5, 0.4, 100.0, 1e9, None], EDGES)
    assert histogram.counts == [1, 0, 2, 3]
    assert histogram.value() == {"edges": EDGES, "counts": [1, 0, 2, 3]}


def test_histograms_with_other_bounds_are_not_added() -> None:
    with pytest.raises(ValueError, match=r"'lengths'.*edges.*Sketch"):
        reduce([{"lengths": Histogram.of([1], [0, 1, 2])}, {"lengths": Histogram.of([1], [0, 1, 3])}])


def test_wrong_bounds_are_refused() -> None:
    for edges in ((0, 2, 1), (0, 0, 1), (0, 1)):
        with pytest.raises(ValueError, match="ascending edges"):
            Histogram(edges, [1, 1])


def test_nothing_observed_is_none_and_broken_numbers_show() -> None:
    assert Sketch.of([]).value() is None and Histogram.of([], EDGES).value() is None
    sketch = Sketch.of([1.0, math.nan, math.inf])
    assert sketch.value()["count"] == 3 and math.isnan(sketch.value()["mean"])
    assert sketch.value()["p50"] == pytest.approx(1.0, rel=SKETCH_ERROR)
    assert math.isnan(merge(sketch, Sketch.of([2.0])).value()["max"])


def test_distributions_travel_between_processes() -> None:
    for value in (Sketch.of([1, -2, 0]), Histogram.of([1], EDGES)):
        assert pickle.loads(pickle.dumps(value)) == value
