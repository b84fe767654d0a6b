"""A pool that changes by itself stays within its bounds, and never swings to and fro."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.loop.worker_scaling import GENERATING, STEP, TOKENS, WAIT, WINDOW, Growth

pytestmark = pytest.mark.property


def swings(sizes):
    """How often the pool shrank after it had grown."""
    changes = [b - a for a, b in pairwise(sizes) if a != b]
    return sum(a > 0 > b for a, b in pairwise(changes))


def played(growth, records):
    """The size after every step; a worker joins and leaves within a step."""
    sizes = []
    for figures in records:
        growth.see(figures)
        growth.set_current(growth.wanted)
        sizes.append(growth.wanted)
    return sizes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 8), st.integers(1, 60))
def test_whatever_the_records_say_swings_are_few_and_bounds_are_kept(seed, fewest, most, length):
    """Records of nobody's making, in episodes, each calm or busy: the worst a run can do."""
    rng, steps = random.Random(seed), 1500
    records = []
    while len(records) < steps:
        waits, busy = rng.choice(((0.0, 0.05), (0.5, 0.95), (rng.random(), rng.random())))
        for _ in range(rng.randint(1, length)):
            tokens = rng.choice((10.0, 1000.0, 10.0 ** rng.uniform(0, 6)))
            records.append({STEP: 1.0, WAIT: waits, GENERATING: busy, TOKENS: tokens})
    sizes = played(Growth(fewest, most), records)
    assert min(sizes) == fewest and max(sizes) <= max(fewest, most)
    assert all(abs(b - a) <= 1 for a, b in pairwise(sizes))
    assert swings(sizes) <= math.log2(len(records) / WINDOW) + 1


def simulated(rng, growth, steps, *, work, train, cores, noise):
    """A run at one pace: `work` seconds of one worker a step beside `train` of the trainer, on so many cores.

    Generation and training overlap, so a step lasts as long as the longer one; workers beyond the cores add
    nothing. Returns the sizes.
    """

    def step(workers):
        generating = work / min(workers, cores) * math.exp(rng.gauss(0, noise))
        training = train * math.exp(rng.gauss(0, noise))
        seconds = max(generating, training)
        return {
            STEP: seconds,
            WAIT: seconds - training,
            GENERATING: generating / seconds,
            TOKENS: 1000.0,
        }

    sizes = []
    for _ in range(steps):
        growth.see(step(growth.wanted))
        growth.set_current(growth.wanted)
        sizes.append(growth.wanted)
    return sizes


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_run_finds_its_size_and_stays(seed):
    """No more are added than pay, and none that pays is missed: within one of the size that is enough."""
    rng = random.Random(seed)
    work, cores = rng.uniform(1, 12), rng.choice((1, 2, 4, 16))
    sizes = simulated(rng, Growth(1, 8), 400, work=work, train=2.0, cores=cores, noise=0.05)
    enough = min(8, cores, math.ceil(work / 2.0))
    assert abs(sizes[-1] - enough) <= 1, (sizes[-1], enough)
    late = sizes[200:]
    assert swings(late) <= 2 and max(late) - min(late) <= 1
