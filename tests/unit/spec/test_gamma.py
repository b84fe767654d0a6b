"""The choice of gamma: the best predicted throughput, without flutter, from batches and sums alone."""

from __future__ import annotations

import itertools
import random
from math import exp

import pytest

from rlpipe.spec.gamma import AdaptiveGamma, FixedGamma

pytestmark = pytest.mark.unit
COSTS = {(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4, (64, 0): 4.0, (64, 1): 8.0, (64, 2): 12.0}


def _teach(policy: AdaptiveGamma, alphas: list[float], rows: int = 4096, steps: int = 8) -> None:
    """Steps whose drafts were accepted at these rates."""
    for _ in range(steps):
        reached, drafted, accepted = float(rows), [], []
        for alpha in alphas:
            drafted.append(round(reached))
            reached *= alpha
            accepted.append(round(reached))
        policy.observe(drafted, accepted)


def test_a_fixed_gamma_stays():
    policy = FixedGamma(2)
    policy.observe([5, 0], [0, 0])
    assert [policy.choose(batch) for batch in (1, 8, 64)] == [2, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_argmax_of_tokens_per_second(seed):
    """Against throughput written out for random costs and acceptances."""
    rng = random.Random(seed)
    costs = {(batch, gamma): rng.uniform(0.5, 1.5) + gamma * 0.3 for batch in (1, 8) for gamma in range(4)}
    alphas = [round(rng.uniform(0.2, 1.0), 2) for _ in range(3)]
    policy = AdaptiveGamma(costs, margin=0.0)
    _teach(policy, alphas)
    learnt = policy.alphas
    assert learnt == pytest.approx(alphas, abs=0.01)
    for batch in (1, 8):
        speeds = []
        for gamma in range(4):
            tokens, reach = 1.0, 1.0
            for alpha in learnt[:gamma]:
                reach *= alpha
                tokens += reach
            speeds.append(batch * tokens / costs[batch, gamma])
        assert [policy.throughput(batch, gamma) for gamma in range(4)] == pytest.approx(speeds)
        assert policy.choose(batch) == speeds.index(max(speeds))
        assert policy.speedup(batch, 2) == pytest.approx(speeds[2] / speeds[0])


def test_costs_between_two_batches_are_interpolated_and_beyond_the_largest_proportional():
    policy = AdaptiveGamma(COSTS)
    assert policy.seconds(1, 1) == 1.2
    assert policy.seconds(64, 1) == 8.0
    assert policy.seconds(22, 1) == pytest.approx(1.2 + (8.0 - 1.2) * 21 / 63)
    assert policy.seconds(128, 2) == pytest.approx(24.0)
    crossing = [policy.choose(batch) for batch in (1, 64)]
    assert crossing == [2, 0]


def test_costs_below_the_smallest_measured_batch_are_those_of_the_smallest():
    policy = AdaptiveGamma({(4, 0): 1.0, (4, 1): 1.5})
    assert policy.seconds(1, 1) == policy.seconds(4, 1) == 1.5


def test_a_change_must_promise_the_margin():
    """gamma 1 against 0 at alpha: 1 + alpha tokens in 1.5 seconds, so 1.5 % better or 4 % better."""
    costs = {(1, 0): 1.0, (1, 1): 1.5}
    for alpha, expected in ((0.5225, 0), (0.56, 1)):
        policy = AdaptiveGamma(costs, prior=0.1, margin=0.02)
        assert policy.choose(1) == 0
        _teach(policy, [alpha])
        assert policy.throughput(1, 1) > policy.throughput(1, 0)
        assert policy.choose(1) == expected
    eager = AdaptiveGamma(costs, prior=0.1, margin=0.0)
    eager.choose(1)
    _teach(eager, [0.5225])
    assert eager.choose(1) == 1


def test_the_margin_is_kept_apart_for_small_and_large_batches():
    """What is best for one row does not stick to 64 rows."""
    policy = AdaptiveGamma(COSTS)
    assert [policy.choose(batch) for batch in (1, 64, 1, 64)] == [2, 0, 2, 0]


def _draft(policy: AdaptiveGamma, steps: int, alpha: float) -> list[int]:
    """Choices for one row, while each depth that is drafted is accepted at this rate."""
    choices = []
    for _ in range(steps):
        choices.append(gamma := policy.choose(1))
        if gamma:
            _teach(policy, [alpha] * gamma, rows=64, steps=1)
    return choices


def test_drafting_that_was_given_up_is_tried_again_ever_more_rarely():
    """Each probe costs what the draft has missed; it does not come more rarely than RARER times the first."""
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.4, (1, 2): 1.8}, prior=0.1, probe_every=10)
    choices = _draft(policy, 1000, 0.0)
    assert set(choices) == {0, 2}
    runs = [(gamma, len(list(run))) for gamma, run in itertools.groupby(choices)]
    assert [length for gamma, length in runs if gamma == 2] == [AdaptiveGamma.PROBE] * (len(runs) // 2)
    between = [length for gamma, length in runs if gamma == 0][:-1]
    assert between == [10, 20, 40] + [10 * AdaptiveGamma.RARER] * (len(between) - 3)


def test_drafting_comes_back_when_it_pays_and_is_then_tried_early_again():
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.4, (1, 2): 1.8}, prior=0.1, probe_every=10)
    _draft(policy, 400, 0.0)
    assert _draft(policy, 800, 0.95)[-1] == 2  # an update made the draft good
    after = _draft(policy, 800, 0.0)  # and another one bad
    last = next(step for step, gamma in enumerate(after) if gamma == 0 and after[step + 1] == 0)
    assert after[last : last + 10] == [0] * 10 and after[last + 10 :].index(2) <= 1


def test_a_draft_that_became_good_is_noticed_within_a_few_probes_of_one_row():
    """Long acceptance of nothing does not outweigh the few rows of a probe for ever."""
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.4, (1, 2): 1.8}, prior=0.1, probe_every=10)
    _teach(policy, [0.0, 0.0], rows=64, steps=400)
    probes = 0
    while policy.alphas[0] < 0.45:
        if gamma := policy.choose(1):
            probes += gamma
            policy.observe([1] * gamma, [1] * gamma)
    assert probes <= 2 * 20 * AdaptiveGamma.PROBE


def test_the_probe_counts_steps_since_the_deepest_draft():
    """A gamma of 1 in use does not keep depth 2 known."""
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.1, (1, 2): 5.0}, probe_every=5)
    seen = []
    for _ in range(18):
        gamma = policy.choose(1)
        seen.append(gamma)
        policy.observe([1] * gamma, [1] * gamma)
    assert seen == [1] * 5 + [2] * AdaptiveGamma.PROBE + [1] * 5


def test_old_acceptance_is_forgotten_with_the_stated_memory_at_every_depth():
    """Sums shrink by 1 - rows / MEMORY a step, also at a depth that few of the rows reach."""
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4}, prior=0.5)
    _teach(policy, [1.0, 1.0], rows=8, steps=4000)
    assert policy.alphas == pytest.approx([1.0, 1.0], abs=1e-6)
    steps = AdaptiveGamma.MEMORY // 8
    for _ in range(steps):
        policy.observe([8, 2], [2, 0])
    left = (1 - 8 / AdaptiveGamma.MEMORY) ** steps
    assert policy.alphas[0] == pytest.approx(left + (1 - left) / 4, abs=1e-3)
    assert policy.alphas[1] == pytest.approx(left / (left + (1 - left) / 4), abs=1e-3)


def test_a_step_larger_than_the_memory_replaces_what_was_known():
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2}, prior=0.9)
    policy.observe([10_000], [2_500])
    assert policy.alphas == [0.25]


def test_a_shallow_step_says_nothing_of_deeper_depths():
    policy = AdaptiveGamma(COSTS)
    before = policy.alphas[1]
    policy.observe([100], [100])
    assert policy.alphas[1] == before
    assert policy.alphas[0] > before


def _run(
    policy: AdaptiveGamma,
    batch: int,
    true: dict[int, float],
    steps: int,
    noise: float = 0.0,
    kept: int | None = None,
) -> list[int]:
    """Choices over steps that take what `true` says, `kept` of the rows accepted at every depth, or all."""
    rng, choices = random.Random(1), []
    for _ in range(steps):
        gamma = policy.choose(batch)
        choices.append(gamma)
        policy.observe([batch] * gamma, [batch if kept is None else kept] * gamma)
        policy.timed(batch, gamma, true[gamma] * exp(rng.gauss(0, noise)))
    return choices


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_costs_that_were_measured_wrong_are_corrected_in_use(slower):
    """Measured, gamma 2 looks cheap; in use it costs more than its three tokens are worth."""
    measured = {(8, 0): 1.0, (8, 1): 1.3, (8, 2): 1.4}
    true = {0: 1.0 * slower, 1: 1.3 * slower, 2: 2.6 * slower}
    policy = AdaptiveGamma(measured, prior=0.9)
    choices = _run(policy, 8, true, 1500, noise=0.05)
    assert choices[0] == 2
    assert choices[-500:].count(1) > 450
    assert policy.seconds(8, 2) / policy.seconds(8, 1) == pytest.approx(2.0, rel=0.1)


def test_what_a_neighbour_costs_is_learnt_within_a_hundred_steps():
    """A short run must not be over before a wrong first measurement is corrected."""
    policy = AdaptiveGamma({(100, 0): 1.0, (100, 1): 1.2}, prior=0.36)
    choices = _run(policy, 100, {0: 1.0, 1: 1.6}, 200, kept=36)
    assert choices[0] == 1 and choices[70:].count(0) > 120


def test_at_the_largest_gamma_every_trial_is_of_the_one_below():
    policy = AdaptiveGamma({(8, 0): 1.0, (8, 1): 1.2}, prior=0.9, explore_every=20)
    choices = _run(policy, 8, {0: 1.0, 1: 1.2}, 200)
    trials = [step for step, gamma in enumerate(choices) if gamma == 0][::2]
    assert [step - trials[0] for step in trials[:7]] == [0, 8, 16, 24, 32, 52, 72]


def test_a_machine_that_slows_down_for_a_while_changes_no_choice():
    """Whatever gamma is in use then is not to blame."""
    true = {0: 1.0, 1: 1.3, 2: 1.4}
    policy = AdaptiveGamma({(8, gamma): seconds for gamma, seconds in true.items()}, prior=0.9)
    _run(policy, 8, true, 200)
    choices = _run(policy, 8, {gamma: 4 * seconds for gamma, seconds in true.items()}, 60)
    choices += _run(policy, 8, true, 400)
    assert choices.count(2) > 0.9 * len(choices)
    assert policy.seconds(8, 1) / policy.seconds(8, 2) == pytest.approx(1.3 / 1.4, rel=0.15)


def test_exploring_costs_two_steps_in_the_stated_number():
    policy = AdaptiveGamma({(8, 0): 1.0, (8, 1): 1.3, (8, 2): 2.2}, prior=0.9, explore_every=20)
    choices = _run(policy, 8, {0: 1.0, 1: 1.3, 2: 2.2}, 2000)
    assert choices.count(1) == pytest.approx(2000 * 18 / 20, rel=0.02)


def test_a_choice_depends_on_nothing_but_batches_and_sums():
    """Two policies told the same sums choose alike, however often each was asked about other things."""
    policies = [AdaptiveGamma(COSTS), AdaptiveGamma(COSTS)]
    rng = random.Random(0)
    for _ in itertools.repeat(None, 50):
        batch = rng.randint(1, 64)
        policies[0].throughput(batch, 1)
        choices = {policy.choose(batch) for policy in policies}
        assert len(choices) == 1
        told = [rng.randint(0, batch) for _ in range(max(choices))]
        for policy in policies:
            policy.observe(told, [n // 2 for n in told])
