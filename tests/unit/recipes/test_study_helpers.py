"""What all studies share: finished parts are not repeated, rates know their edge, spread tells seeds."""

from __future__ import annotations

import pytest

from recipes.runs import as_text, choose_rate, kept, over_seeds, seeds_to_decide

pytestmark = pytest.mark.unit


def test_a_finished_part_is_read_and_not_computed_again(tmp_path):
    file, calls = tmp_path / "cells" / "one.json", []

    def compute() -> dict:
        calls.append(1)
        return {"value": 0.5}

    assert kept(file, compute) == kept(file, compute) == {"value": 0.5}
    assert len(calls) == 1


@pytest.mark.parametrize(("best", "edge"), [(1e-4, True), (3e-4, False), (1e-3, True)])
def test_the_best_rate_tells_whether_it_is_at_the_edge(best, edge):
    chosen = choose_rate({lr: -abs(lr - best) for lr in (1e-4, 3e-4, 1e-3)})
    assert (chosen["lr"], chosen["edge"]) == (best, edge)
    assert chosen["sweep"][f"{best:g}"] == 0


def test_the_number_of_seeds_that_decide_is_the_first_whose_interval_leaves_zero_out():
    values = [0.1, 0.3, -0.1, 0.2]
    count = seeds_to_decide(values)
    interval = over_seeds(values).interval
    assert interval.low < 0 < interval.high and count is not None and count > len(values)

    # As many copies of the values as needed have their mean, and nearly their spread.
    assert over_seeds(values * -(-count // 4)).interval.low > 0
    assert over_seeds((values * count)[: count // 2]).interval.low < 0
    assert seeds_to_decide([1.0, -1.0, 0.01]) is None
    assert seeds_to_decide([1.0, 1.01, 1.02]) == 2


def test_an_estimate_is_written_with_its_ends_and_none_as_a_dash():
    assert as_text([0.5, -0.25, 1.25]) == "+0.500 [-0.250, +1.250]"
    assert as_text(None) == "–"
