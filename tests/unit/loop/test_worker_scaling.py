"""When a run takes in a rollout worker, when it gives one up, and whose word counts."""

import math
from itertools import pairwise

import pytest

from rlpipe.loop.worker_scaling import GENERATING, STEP, TOKENS, WAIT, WINDOW, Growth

pytestmark = pytest.mark.unit


def record(waits, busy, seconds=10.0, tokens=1000.0):
    return {STEP: seconds, WAIT: waits * seconds, GENERATING: busy, TOKENS: tokens}


def steps(growth, count, *args, **figures):
    for _ in range(count):
        growth.see(record(*args, **figures))


def grown(**figures):
    """A pool of two whose second worker was added by itself, at 100 tokens a second."""
    growth = Growth(1, 3)
    steps(growth, WINDOW + 1, 0.5, 0.9)
    assert growth.wanted == 2 and "waits 50%" in growth.reason
    growth.set_current(2)
    steps(growth, WINDOW + 1, **figures)
    return growth


def test_a_worker_is_added_while_the_trainer_waits_and_workers_are_busy():
    growth = Growth(1, 2)
    steps(growth, WINDOW, 0.5, 0.9)
    assert growth.wanted == 1  # the first step is not counted
    steps(growth, 1, 0.5, 0.9)
    assert growth.wanted == 2


@pytest.mark.parametrize(("waits", "busy"), [(0.1, 0.9), (0.5, 0.4)])
def test_none_is_added_where_it_would_not_help(waits, busy):
    growth = Growth(1, 4)
    steps(growth, 50, waits, busy)
    assert growth.wanted == 1


def test_a_record_without_figures_is_no_step():
    growth = Growth(1, 2)
    for _ in range(50):
        growth.see(record(0.5, 0.9) | {GENERATING: None})
        growth.see({})
    assert growth.wanted == 1


def test_nothing_is_judged_while_a_worker_joins():
    growth = Growth(1, 3)
    steps(growth, 50, 0.5, 0.9)
    assert growth.wanted == 2


def test_the_step_in_which_a_worker_joined_is_not_counted():
    growth = Growth(1, 3)
    steps(growth, WINDOW + 1, 0.5, 0.9)
    growth.set_current(2)
    steps(growth, 1, 0.5, 0.9, seconds=10_000.0)  # would make the new size look slow
    steps(growth, WINDOW, 0.5, 0.9, seconds=5.0)
    assert growth.wanted == 3


def test_what_was_seen_before_a_change_is_not_mixed_with_what_comes_after():
    growth = Growth(1, 3)
    steps(growth, WINDOW + 1, 0.5, 0.9)
    growth.set_current(2)
    steps(growth, WINDOW, 0.0, 0.1)
    assert growth.wanted == 2
    steps(growth, 1, 0.0, 0.1)
    assert growth.wanted == 1


def test_a_worker_that_does_not_pay_goes_and_is_tried_again_ever_more_seldom():
    growth, added, workers = Growth(1, 3), [], 1
    for step in range(400):
        steps(growth, 1, 0.5, 0.9)
        if growth.wanted > workers:
            added.append(step)
        workers = growth.wanted
        growth.set_current(workers)
    assert len(added) == 5 and "one worker fewer" in growth.reason
    gaps = [later - sooner for sooner, later in pairwise(added)]
    assert gaps == sorted(gaps) and gaps[-1] >= 8 * gaps[0] / 2


def test_longer_answers_are_no_proof_against_a_worker():
    growth = grown(waits=0.1, busy=0.9, seconds=15.0, tokens=2000.0)  # slower steps, more tokens a second
    assert growth.wanted == 2


def test_a_worker_that_is_idle_goes_but_never_one_of_the_first():
    growth = grown(waits=0.0, busy=0.2, seconds=5.0)
    assert growth.wanted == 1
    growth.set_current(1)
    steps(growth, 50, 0.0, 0.1)
    assert growth.wanted == 1


def test_what_a_user_drained_is_not_put_back():
    growth = grown(waits=0.1, busy=0.9, seconds=5.0)
    growth.requested(-1)
    growth.set_current(1)
    steps(growth, 100, 0.5, 0.9)
    assert growth.wanted == 1


def test_what_a_user_drained_while_a_worker_joined_is_not_put_back_either():
    growth = Growth(2, 3)
    steps(growth, WINDOW + 1, 0.5, 0.9)
    assert growth.wanted == 3
    growth.requested(-1)
    growth.set_current(2)  # one came and one went
    assert growth.wanted == 2
    steps(growth, 100, 0.5, 0.9)
    assert growth.wanted == 2


@pytest.mark.parametrize("most", [0, 4])
def test_what_a_user_added_is_not_taken_out(most):
    growth = Growth(1, most)
    growth.requested(1)
    growth.set_current(2)
    steps(growth, 100, 0.0, 0.1)
    assert growth.wanted == 2


def test_a_pool_that_keeps_its_size_is_left_alone():
    growth = Growth(2, 0)
    for waits, busy in ((0.9, 0.9), (0.0, 0.0)):
        steps(growth, 50, waits, busy)
        assert growth.wanted == 2


def test_a_worker_that_cannot_be_had_is_asked_for_ever_more_seldom():
    growth, asked = Growth(1, 2), 0
    for _ in range(1000):
        steps(growth, 1, 0.5, 0.9)
        growth.set_current(1)
        if growth.wanted == 2:
            growth.refused()
            asked += 1
            assert growth.wanted == 1
    assert asked == int(math.log2(1000 / WINDOW))
