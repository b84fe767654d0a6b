"""Clustered errors against known formulas, and against resampling of prompts."""

import random
from math import isnan, sqrt
from statistics import fmean, stdev

import pytest

from rlpipe.adapt.estimates import (
    LENGTH,
    RATE,
    TOKENS,
    PromptCounts,
    count,
    counts_from_json,
    difference,
    estimate,
    figures,
    pooled,
    to_json,
)
from rlpipe.metrics.collect import clustered_standard_error
from rlpipe.types import SpecCounts, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def made(accepted, steps, gamma=1):
    """One prompt at gamma 1 with so many accepted drafts in so many verify steps."""
    spec = SpecCounts(drafted=[steps], accepted=[accepted], verify_steps=steps, proposed=steps * gamma)
    return PromptCounts(spec=spec, emitted=accepted + steps)


def crowd(rng, prompts, shift=0.0):
    """Prompts whose own rates differ, with differing numbers of verify steps."""
    found = {}
    for i in range(prompts):
        steps, rate = rng.randint(5, 40), min(1.0, max(0.0, rng.gauss(0.6 + shift, 0.2)))
        found[f"p{i}"] = made(sum(rng.random() < rate for _ in range(steps)), steps)
    return found


def test_one_verify_step_a_prompt_gives_the_textbook_error():
    outcomes = [1, 0, 0, 1, 1, 1, 0, 1]
    found = estimate({f"p{i}": made(x, 1) for i, x in enumerate(outcomes)}, RATE)
    assert found.value == fmean(outcomes)
    assert found.se == pytest.approx(stdev(outcomes) / sqrt(len(outcomes)))


def test_errors_are_those_of_rewards_clustered_by_instance():
    rng = random.Random(0)
    counts = {f"p{i}": (rng.randint(0, 7), 7) for i in range(12)}
    attempts = [(name, float(k < n)) for name, (n, steps) in counts.items() for k in range(steps)]
    found = estimate({name: made(*pair) for name, pair in counts.items()}, RATE)
    assert found.se == pytest.approx(clustered_standard_error(attempts))


def test_the_error_is_the_spread_of_the_rate_over_fresh_prompts():
    rng = random.Random(1)
    found = [estimate(crowd(rng, 60), RATE) for _ in range(400)]
    spread = stdev(one.value for one in found)
    assert fmean(one.se for one in found) == pytest.approx(spread, rel=0.12)
    naive = sqrt(0.6 * 0.4 / (60 * 22))  # verify steps taken for independent
    assert spread > 1.5 * naive


def test_a_paired_difference_removes_what_the_prompts_have_in_common():
    rng = random.Random(2)
    ours = crowd(rng, 50)
    theirs = {name: made(max(0, c.spec.accepted[0] - 1), c.spec.verify_steps) for name, c in ours.items()}
    gap = difference(ours, theirs, RATE)
    apart = sqrt(estimate(ours, RATE).se ** 2 + estimate(theirs, RATE).se ** 2)
    assert gap.value == pytest.approx(estimate(ours, RATE).value - estimate(theirs, RATE).value)
    assert gap.se < apart / 3
    same = difference(ours, ours, RATE)
    assert (same.value, same.se, same.df) == (0.0, 0.0, 49)


def test_only_prompts_that_both_have_are_compared():
    ours, theirs = {"a": made(1, 2), "b": made(2, 2)}, {"b": made(1, 2), "c": made(0, 2)}
    assert difference(ours, theirs, RATE).df == 0
    assert difference(ours, theirs, RATE).value == 0.5
    assert isnan(difference(ours, theirs, RATE).se)


def test_seeds_of_one_prompt_stay_one_cluster():
    counts = crowd(random.Random(3), 20)
    once, thrice = estimate(counts, RATE), estimate(pooled([counts] * 3), RATE)
    assert (thrice.value, thrice.se) == (pytest.approx(once.value), pytest.approx(once.se))


def test_figures_are_ratios_of_sums():
    spec = SpecCounts(drafted=[4, 3, 1], accepted=[3, 1, 1], verify_steps=4, proposed=12)
    counts = {"a": PromptCounts(spec=spec, emitted=8)}
    values = [estimate(counts, figure).value for figure in figures(3)]
    assert values == [5 / 12, 9 / 4, 2.0, 3 / 4, 1 / 3, 1.0]
    assert isnan(estimate({}, LENGTH).value)
    assert counts_from_json(to_json(counts)) == counts


def test_masked_attempts_and_first_tokens_of_turns_do_not_count():
    kept, masked = (
        Trajectory(
            trajectory_id=name,
            group_id="g",
            instance_id="i",
            loss_mask=[0, 1, 1, 1, 0, 1, 1],
            num_turns=2,
            spec=SpecCounts(drafted=[2], accepted=[1], verify_steps=2, proposed=2),
        )
        for name in "ab"
    )
    masked.status = TrajectoryStatus.MASKED
    counts = count([kept, masked])
    assert counts["i"].spec.verify_steps == 2
    assert estimate(counts, TOKENS).value == 3 / 2
