"""The order of data: epochs, exact resumption, and how much context counts."""

import random
from collections import Counter

import pytest

from rlpipe.adapt.order import DataOrder, with_context
from rlpipe.types import Trajectory

pytestmark = pytest.mark.unit


def made(name, mask=(0, 0, 1, 1)):
    mask = list(mask)
    return Trajectory(
        trajectory_id=name, group_id="g", instance_id="i", token_ids=mask[:], loss_mask=mask, reward=0.0
    )


def names(batch):
    return [trajectory.trajectory_id for trajectory in batch]


def test_every_trajectory_comes_once_an_epoch_across_batch_borders():
    order = DataOrder([made(str(i)) for i in range(7)], batch=3, seed=0)
    seen = [name for step in range(7) for name in names(order[step])]  # three epochs
    assert Counter(seen) == {str(i): 3 for i in range(7)}
    assert sorted(seen[:7]) == sorted(seen[7:14])
    assert seen[:7] != seen[7:14]
    assert order.epoch(7) == 3


def test_a_step_has_the_same_batch_whatever_was_asked_before():
    data = [made(str(i), (0, 0, 0, 0, 0, 1, 1)) for i in range(5)]
    through = DataOrder(data, 2, seed=3, context_weight=0.5)
    batches = [through[step] for step in range(9)]
    for step in (8, 2, 5):
        assert DataOrder(data, 2, seed=3, context_weight=0.5)[step] == batches[step]
    other = DataOrder(data, 2, seed=4, context_weight=0.5)
    assert [other[step] for step in range(9)] != batches


def test_context_counts_as_often_as_its_weight_and_stays_apart_from_turns():
    rng = random.Random(0)
    mask = [0] * 6 + [1] * 3 + [0] * 5 + [1] * 2
    masks = [with_context(made("t", mask), 0.3, rng).loss_mask.tolist() for _ in range(4000)]
    for start, stop in ((1, 5), (10, 13)):
        share = sum(m[start] for m in masks) / len(masks)
        assert share == pytest.approx(0.3, abs=0.03)
        assert all(len(set(m[start:stop])) == 1 for m in masks)  # a stretch counts as a whole
    for m in masks:
        assert all(m[i] for i, sampled in enumerate(mask) if sampled)
        assert not any(m[i] for i in (0, 5, 9, 13))  # one token at either end keeps turns apart


def test_without_weight_nothing_is_copied():
    data = [made("t")]
    assert DataOrder(data, 1, seed=0)[0][0] is data[0]


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="no trajectory to train on"):
        DataOrder([], 1, seed=0)
