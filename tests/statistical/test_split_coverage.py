"""Intervals of the split of acceptance hold the truth they are about, in every simulation of the benchmark.

Nominal level .95, 120 draws a case through `AcceptanceSplit`. At a coverage of .93 fewer than .85 of 120 are
covered with probability .002; where residuals are correlated by .8 the total has .88. Errors that take
residuals for independent covered .78 at a correlation of .45, a slope blind to noise .53. The slope of least
squares, blind to noise in the entropy, must fail.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest

from rlpipe.diagnosis.regression import contrast, instrumented_slope

pytestmark = pytest.mark.statistical
BENCH = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench" / "coverage.py"))
DRAWS = 400


@pytest.mark.parametrize("case", BENCH["CASES"])
def test_every_interval_covers_its_truth(case):
    found = BENCH["coverage"](case, 120, seed=11)
    assert found.pop("no slope between steps") < 0.6
    assert min(found.values()) >= (0.78 if case == "correlated .8" else 0.85), found


def test_without_a_second_measurement_noise_flattens_the_slope_and_the_interval_misses_it():
    rng, covered = np.random.default_rng(12), {True: 0, False: 0}
    for _ in range(DRAWS):
        true, noise = 0.06 * rng.standard_normal(120), 0.06 * rng.standard_normal((2, 120))
        y = 0.9 - 0.3 * true + 0.005 * rng.standard_normal(120)
        for given in covered:
            second = true + noise[1] if given else None
            covered[given] += instrumented_slope(y, true + noise[0], second, early=60, level=0.95).covers(
                -0.3
            )
    assert covered[True] >= 0.93 * DRAWS and covered[False] < 0.5 * DRAWS


@pytest.mark.parametrize("points", [6, 7, 9, 12])
def test_few_points_have_intervals_that_cover(points):
    rng, weights = np.random.default_rng(points), np.zeros(points)
    weights[:2], weights[-2:] = -0.5, 0.5
    assert sum(contrast(rng.normal(size=points), weights).covers(0) for _ in range(DRAWS)) >= 0.93 * DRAWS
