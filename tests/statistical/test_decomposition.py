"""The decomposition on runs whose truth is known: 200 draws a case, intervals of level 0.99.

An interval that covers with probability 0.985 covers 190 or more of 200 draws with probability 0.999; one
of 0.95 would in half of the cases. Coverage alone is met by absurdly wide intervals: their mean width is
held against that of an oracle.
"""

from statistics import NormalDist

import numpy as np
import pytest

from rlpipe.diagnosis.acceptance_split import of_run
from rlpipe.diagnosis.decomposition import decompose
from rlpipe.diagnosis.regression import robust_slope
from tests.helpers.planted_runs import CONTEXTS, FIXED, SLOPE, planted_run
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


def share_of_context(index):
    """How much of the planted mismatch the contexts of a table have."""
    rng = np.random.default_rng(1000 + index)
    rng.normal(0, 0.02, CONTEXTS)
    return rng.uniform(0.5, 1.5, CONTEXTS)


def test_every_part_of_the_split_of_a_run_covers_its_truth(tmp_path):
    """Planted runs, by their law, level .95: 19 or more of 24 are covered with probability .999 then."""
    planted = {"entropy": -0.2, "mismatch": -0.06, "staleness": -0.05, "contexts": 0.04}
    covered = dict.fromkeys((*planted, "total"), 0)
    for seed in range(24):
        split = of_run(planted_run(tmp_path / str(seed), seed, **planted)).at(1)
        # Means of the first 20 and the last 10 of 60 steps; the law is linear in time.
        moved = (54.5 - 9.5) / 59
        shares = np.mean([share_of_context(i) for i in range(FIXED)])
        probed = (np.mean([51, 56]) - np.mean([1, 6, 11, 16])) / 59
        truth = {
            "entropy": SLOPE * split.entropy_change,
            "mismatch": planted["mismatch"] * probed * shares,
            "staleness": planted["staleness"] * probed,
            "total": SLOPE * split.entropy_change
            + moved * sum(planted[name] for name in ("mismatch", "staleness", "contexts")),
        }
        truth["contexts"] = truth["total"] - truth["entropy"] - truth["mismatch"] - truth["staleness"]
        for name, value in truth.items():
            covered[name] += split.parts[name].covers(value)
    assert min(covered.values()) >= 19, covered
