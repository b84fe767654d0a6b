"""The decomposition on runs whose truth is known: 200 draws a case, intervals of level 0.99.

An interval that covers with probability 0.985 covers 190 or more of 200 draws with probability 0.999; one
of 0.95 would in half of the cases. Coverage alone is met by absurdly wide intervals: their mean width is
held against that of an oracle.
"""

from statistics import NormalDist

import numpy as np
import pytest

from rlpipe.diagnosis.attribution import Evaluations, attribute
from rlpipe.diagnosis.decomposition import decompose
from rlpipe.diagnosis.regression import robust_slope
from rlpipe.metrics.statistics import Estimate
from tests.helpers.synthetic_runs import NOISES, oracle_half_widths, synthetic_run

pytestmark = pytest.mark.statistical

DRAWS, EARLY, WINDOW, LEVEL = 200, 30, 15, 0.99
WANTED = 190
DRIFTS = {
    "entropy only": {"entropy_drift": 0.4},
    "mismatch only": {"mismatch_drift": -0.1},
    "both": {"entropy_drift": -0.3, "mismatch_drift": -0.1},
    "noise alone": {},
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("drifts", DRIFTS.values(), ids=list(DRIFTS))
def test_each_part_is_recovered_within_its_interval_and_intervals_are_not_wide(noise, drifts):
    rng = np.random.default_rng(20)
    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    covered, widths = np.zeros(3), []
    for _ in range(DRAWS):
        run = synthetic_run(rng, noise=noise, early=EARLY, **drifts)
        found = decompose(run.steps, run.observed, run.entropy, early=EARLY, window=WINDOW, level=LEVEL)
        by_entropy = run.slope * run.change(run.entropy, EARLY, WINDOW)
        by_mismatch = run.change(run.mismatch, EARLY, WINDOW)
        covered += [
            found.slope.interval.covers(run.slope),
            found.entropy.interval.covers(by_entropy),
            found.mismatch.interval.covers(by_mismatch),
        ]
        oracle = oracle_half_widths(run, EARLY, WINDOW, quantile)
        widths.append((found.entropy.half_width / oracle[0], found.mismatch.half_width / oracle[1]))
        assert abs(found.entropy.value + found.mismatch.value - found.total.value) < 1e-9
    assert covered.min() >= WANTED, covered
    assert np.mean(widths, 0).max() <= 2.0


def test_without_a_trend_a_growing_mismatch_is_mistaken_for_a_slope():
    rng = np.random.default_rng(21)
    covered = {True: 0, False: 0}
    for _ in range(DRAWS):
        run = synthetic_run(rng, early=EARLY, mismatch_drift=-0.4)
        entropy = run.entropy + 0.2 * np.arange(len(run.entropy)) / EARLY  # rises from the first step on
        observed = run.observed + run.slope * (entropy - run.entropy)
        for trend in covered:
            covered[trend] += robust_slope(
                entropy[:EARLY], observed[:EARLY], trend=trend, level=LEVEL
            ).interval.covers(run.slope)
    assert covered[True] >= WANTED > covered[False] + 50


def test_the_slope_survives_steps_that_least_squares_does_not():
    rng = np.random.default_rng(22)
    ours, plain = [], []
    for _ in range(DRAWS):
        run = synthetic_run(rng, early=EARLY)
        h, y = run.entropy[:EARLY], run.observed[:EARLY].copy()
        y[rng.choice(EARLY, 3, replace=False)] -= 0.3  # three steps in which the engine was ill
        ours.append(robust_slope(h, y).value - run.slope)
        plain.append(np.polyfit(h, y, 1)[0] - run.slope)
    assert np.square(ours).mean() < 0.05 * np.square(plain).mean()


@pytest.mark.parametrize("noise", NOISES)
def test_four_causes_are_told_apart_and_add_up(noise):
    rng = np.random.default_rng(23)
    drifts = {
        "entropy_drift": 0.3,
        "mismatch_drift": -0.06,
        "staleness_drift": -0.04,
        "contexts_drift": 0.03,
    }
    covered = dict.fromkeys(("entropy", "mismatch", "staleness", "contexts"), 0)
    widths = []
    for _ in range(DRAWS):
        run = synthetic_run(rng, noise=noise, early=EARLY, **drifts)
        slope = robust_slope(run.entropy[:EARLY], run.current[:EARLY], level=LEVEL)
        found = attribute(_evaluations(run), slope, early=EARLY, window=WINDOW, level=LEVEL)
        truth = {name: run.change(getattr(run, name), EARLY, WINDOW) for name in covered}
        truth["entropy"] *= run.slope
        for name, part in found.parts().items():
            covered[name] += part.interval.covers(truth[name])
        assert abs(sum(p.value for p in found.parts().values()) - found.total.value) < 1e-9
        noise_of = run.sigma * np.sqrt(2 * (1 / EARLY + 1 / WINDOW))
        widths.append(found.staleness.half_width / (noise_of * NormalDist().inv_cdf((1 + LEVEL) / 2)))
    assert min(covered.values()) >= WANTED, covered
    assert np.mean(widths) <= 2.0


def test_parts_add_up_to_rounding_for_any_numbers():
    rng = np.random.default_rng(24)
    for _ in range(DRAWS):
        series = rng.normal(size=(5, 12)) * 10.0 ** rng.integers(-3, 3)
        slope = Estimate(value=rng.normal() * 5, se=0.1, df=9, level=LEVEL)
        for known in (2, 3, 5):
            names = ("observed", "entropy", "current", "fixed", "fixed_entropy")[:known]
            found = attribute(Evaluations(**dict(zip(names, series, strict=False))), slope, early=4, window=4)
            gap = abs(sum(p.value for p in found.parts().values()) - found.total.value)
            assert gap < 1e-9 * max(1.0, np.abs(series).max())


def _evaluations(run):
    return Evaluations(
        observed=run.observed,
        entropy=run.entropy,
        current=run.current,
        fixed=run.fixed,
        fixed_entropy=run.fixed_entropy,
    )
