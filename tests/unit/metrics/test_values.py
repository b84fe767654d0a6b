"""Values reduce like a single process that saw everything."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.metrics.values import Last, Max, Mean, Min, Ratio, Sum, merge, reduce, stats

pytestmark = pytest.mark.unit
NUMBERS = st.floats(-1e6, 1e6)
SHARDS = st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=6)


def test_mean_of_unequal_shards_is_not_the_mean_of_their_means() -> None:
    merged = merge(Mean.of([1.0, 1.0, 1.0]), Mean.of([5.0]))
    assert merged.value() == 2.0  # the mean of means would be 3.0


def test_ratio_divides_sums_once() -> None:
    assert merge(Ratio(1, 2), Ratio(9, 10)).value() == pytest.approx(10 / 12)  # mean of ratios: 0.7


@given(SHARDS)
def test_any_sharding_reduces_to_the_whole(shards: list[list[float]]) -> None:
    whole = [x for shard in shards for x in shard]
    parts = [{**stats("x", shard), "n": Sum(len(shard))} for shard in shards]
    got = {name: value.value() for name, value in reduce(parts).items()}
    assert got["n"] == len(whole)
    if not whole:
        assert got["x/mean"] is got["x/max"] is got["x/min"] is None
        return
    assert got["x/mean"] == pytest.approx(math.fsum(whole) / len(whole), abs=1e-6)
    assert (got["x/max"], got["x/min"]) == (max(whole), min(whole))


@given(st.lists(st.one_of(st.none(), NUMBERS, st.just(math.nan)), max_size=6), st.randoms())
def test_extremes_do_not_depend_on_the_order_even_with_nan(values: list[float | None], random) -> None:
    shuffled = random.sample(values, len(values))
    for kind in (Max, Min):
        a, b = kind.of(values).value(), kind.of(shuffled).value()
        assert a == b or (math.isnan(a) and math.isnan(b))


def test_nan_is_kept_because_a_diverged_loss_must_show() -> None:
    assert math.isnan(Mean.of([1.0, math.nan]).value())
    assert math.isnan(Max.of([1.0, math.nan, 2.0]).value())


def test_nothing_observed_is_none_and_not_zero() -> None:
    empty = [Mean.of([]), Mean.of([None]), Ratio(0, 0), Max.of([]), Min.of([]), Last(None)]
    assert [value.value() for value in empty] == [None] * 6


def test_last_keeps_the_later_reading_and_ignores_an_unobserved_one() -> None:
    assert reduce([{"lr": Last(3)}, {"lr": Last(1)}, {"lr": Last(None)}])["lr"].value() == 1.0


def test_merging_two_types_under_one_name_says_which_metric() -> None:
    with pytest.raises(ValueError, match=r"'a/b'.*Mean.*Sum.*one type"):
        reduce([{"a/b": Mean(1, 1)}, {"a/b": Sum(1)}])


def test_reduce_leaves_its_inputs_alone() -> None:
    first, second = {"a": Mean(1, 1)}, {"a": Mean(2, 1)}
    reduce([first, second])
    assert first["a"] == Mean(1, 1) and second["a"] == Mean(2, 1)


def test_values_travel_between_processes() -> None:
    for value in (Mean(1, 2), Ratio(1, 2), Sum(1), Max(1), Min(1), Last(1)):
        assert pickle.loads(pickle.dumps(value)) == value
