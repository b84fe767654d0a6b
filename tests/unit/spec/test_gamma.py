"""The choice of gamma: the best predicted throughput, without flutter, from batches and sums alone."""

from __future__ import annotations

import itertools
import random
from math import exp

import pytest

from rlpipe.spec.gamma import AdaptiveGamma, FixedGamma, break_even_acceptance

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

    # Doing without drafts needs no margin: 1.5% slower with drafts is enough.
    policy = AdaptiveGamma(costs, prior=0.9, margin=0.02)
    assert policy.choose(1) == 1
    _teach(policy, [0.4775])
    assert policy.choose(1) == 0


def test_the_margin_is_kept_apart_for_small_and_large_batches():
    """What is best for one row does not stick to 64 rows."""
    policy = AdaptiveGamma(COSTS)
    assert [policy.choose(batch) for batch in (1, 64, 1, 64)] == [2, 0, 2, 0]


GIVEN_UP = {(1, 0): 1.0, (1, 1): 1.4, (1, 2): 1.8}


def _draft(
    policy: AdaptiveGamma, steps: int, alpha: float, *, batch: int = 1, missed: float = 0.0
) -> list[int]:
    """Choices over steps whose drafts are kept at this rate, evenly; seconds those of `GIVEN_UP`.

    missed: what a draft's first step costs more for each step without drafts before it.
    """
    choices, owed, without = [], [0.0] * 2, 0
    for _ in range(steps):
        choices.append(gamma := policy.choose(batch))
        reached, drafted, accepted = batch, [], []
        for depth in range(gamma):
            owed[depth] += alpha * reached
            drafted.append(reached)
            accepted.append(reached := int(owed[depth] + 1e-9))
            owed[depth] -= reached
        policy.observe(drafted, accepted)
        policy.timed(batch, gamma, GIVEN_UP[1, gamma] + (missed * without if gamma else 0.0))
        without = 0 if gamma else without + 1
    return choices


def _trials(choices: list[int]) -> list[int]:
    """First steps of runs of another gamma than 0."""
    return [step for step, gamma in enumerate(choices) if gamma and not choices[step - 1]]


@pytest.mark.parametrize("batch", [1, 64])
def test_drafting_that_was_given_up_is_tried_for_its_part_of_the_time(batch):
    """A trial of one row lasts until there are rows to judge; a step of it loses 0.4 of a second a draft."""
    policy = AdaptiveGamma(GIVEN_UP, prior=0.1)
    choices = _draft(policy, 6000, 0.0, batch=batch)[2000:]
    assert sum(choices) * 0.4 == pytest.approx(AdaptiveGamma.BUDGET * 4000, rel=0.25)
    runs = {(gamma, len(list(run))) for gamma, run in itertools.groupby(choices) if gamma}
    assert runs == {(1, max(2, AdaptiveGamma.RECENT // batch)), (2, 2)}


def test_a_draft_that_must_read_what_it_missed_is_tried_more_rarely():
    """Reading costs 0.1 of a step for each without drafts, more than all that trials may cost."""
    free = _trials(_draft(AdaptiveGamma(GIVEN_UP, prior=0.1), 10_000, 0.0, batch=8))
    dear = _trials(_draft(AdaptiveGamma(GIVEN_UP, prior=0.1), 10_000, 0.0, batch=8, missed=0.1))
    assert len(dear) < len(free) / 4

    # A read costs at most 16 steps, which the two shares of the budget save in 4,300 and 12,800 steps.
    assert len(dear) <= 4 + 10_000 / 3200 + 1


def test_a_pause_within_a_trial_does_not_end_all_trials():
    """A server that took new weights meanwhile: hours must not be saved up for it."""
    policy = AdaptiveGamma(GIVEN_UP, prior=0.1)
    _draft(policy, 2000, 0.0, batch=8)
    while not policy.choose(8):
        policy.timed(8, 0, 1.0)
    policy.timed(8, 1, 3600.0)
    choices = _draft(policy, round(1.2 * AdaptiveGamma.MAX_STEPS / AdaptiveGamma.BUDGET), 0.0, batch=8)
    assert choices[:2] == [1, 0] and 1 in choices[2:]


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_draft_that_became_good_is_used_after_few_trials(batch):
    """Long acceptance of nothing does not outweigh the rows of a trial; depth 2 is believed to follow."""
    policy = AdaptiveGamma(GIVEN_UP, prior=0.1)
    _draft(policy, 2000, 0.0, batch=batch)
    choices = _draft(policy, 1500, 0.95, batch=batch)
    came = choices.index(2)
    assert len(_trials(choices[: came + 1])) <= 2
    assert choices[came:].count(2) > 0.9 * len(choices[came:])
    assert _draft(policy, 300, 0.0, batch=batch)[40:].count(0) > 0.9 * 260


def test_old_acceptance_is_forgotten_with_the_stated_memory():
    """Sums of a depth shrink by 1 - rows / MEMORY for the rows that reach it, where nothing surprises."""
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4}, prior=0.5)
    for _ in range(4000):
        policy.observe([8, 4], [4, 2])
    assert policy.alphas == pytest.approx([0.5, 0.5])
    for _ in range(AdaptiveGamma.MEMORY // 8):
        policy.observe([8, 4], [5, 1])
    for alpha, rows, new in zip(policy.alphas, (8, 4), (5 / 8, 1 / 4), strict=True):
        left = (1 - rows / AdaptiveGamma.MEMORY) ** (AdaptiveGamma.MEMORY // 8)
        assert alpha == pytest.approx(left * 0.5 + (1 - left) * new, abs=0.005)


@pytest.mark.parametrize(("old", "new"), [(0.98, 0.25), (0.25, 0.98)])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_other_prompts_are_noticed_within_a_few_rows(batch, old, new):
    policy, rng = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2}), random.Random(0)
    for alpha, rows in ((old, 2000), (new, max(24, 2 * batch))):
        for _ in range(rows // batch):
            policy.observe([batch], [sum(rng.random() < alpha for _ in range(batch))])
    assert policy.alphas[0] == pytest.approx(new, abs=0.2)


def test_prompts_that_stay_are_not_taken_for_others():
    """The estimate keeps the precision of its memory: a restart for every tenth row would lose it."""
    policy, rng, errors = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2}), random.Random(0), []
    for _ in range(4000):
        policy.observe([1], [int(rng.random() < 0.6)])
        errors.append((policy.alphas[0] - 0.6) ** 2)
    assert (sum(errors[500:]) / 3500) ** 0.5 < 0.1


def test_a_step_larger_than_the_memory_replaces_what_was_known():
    policy = AdaptiveGamma({(1, 0): 1.0, (1, 1): 1.2}, prior=0.9)
    policy.observe([10_000], [2_500])
    assert policy.alphas == pytest.approx([0.25], abs=0.001)


def test_drafts_that_are_all_kept_at_many_depths_or_never_are_learnt_from():
    """Belief comes so near to certainty that a float cannot tell: the next rejection is still a number."""
    for kept in (256, 0):
        policy = AdaptiveGamma({(1, gamma): 1.0 + gamma for gamma in range(17)})
        for _ in range(2000):
            policy.observe([256] * 16 if kept else [256], [kept] * (16 if kept else 1))
        policy.observe([256] * 16, [256 - kept] * 16)
        assert policy.alphas == pytest.approx([1 - kept / 256] * 16, abs=0.02)


def test_a_depth_without_drafts_is_believed_to_be_as_good_as_the_one_before():
    policy = AdaptiveGamma(COSTS)
    for _ in range(20):
        policy.observe([100], [20])
    assert policy.alphas == pytest.approx([0.2, 0.2], abs=0.01)


def test_a_shallow_step_that_surprises_nobody_changes_nothing_of_deeper_depths():
    policy = AdaptiveGamma(COSTS)
    for _ in range(20):
        policy.observe([100, 80], [80, 16])
    before = policy.alphas
    policy.observe([100], [75])
    assert policy.alphas[0] < before[0]
    assert policy.alphas[1] == pytest.approx(before[1], abs=0.005)


def _run(
    policy: AdaptiveGamma,
    batch: int,
    true: dict[int, float],
    steps: int,
    noise: float = 0.0,
    kept: int | None = None,
    seed: int = 1,
) -> list[int]:
    """Choices over steps that take what `true` says, `kept` of the rows accepted at every depth, or all."""
    rng, choices = random.Random(seed), []
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


def test_a_wrong_cost_behind_a_neighbour_that_never_pays_is_corrected():
    """Measured while the machine was busy, gamma 0 looks dear; from 2, gamma 1 hides that it is cheap."""
    measured, true = {(8, 0): 2.2, (8, 1): 2.0, (8, 2): 2.1}, {0: 1.0, 1: 2.0, 2: 2.1}
    choices = _run(AdaptiveGamma(measured, prior=0.5), 8, true, 4000, kept=4)
    assert choices[0] == 2 and choices[-1000:].count(0) > 900


def test_what_a_neighbour_costs_is_learnt_within_a_hundred_steps():
    """A short run must not be over before a wrong first measurement is corrected."""
    policy = AdaptiveGamma({(100, 0): 1.0, (100, 1): 1.2}, prior=0.36)
    choices = _run(policy, 100, {0: 1.0, 1: 1.6}, 200, kept=36)
    assert choices[0] == 1 and choices[70:].count(0) > 120


def test_at_the_largest_gamma_every_trial_is_of_the_one_below():
    """The first ones follow one another, later ones wait until they are paid for."""
    policy = AdaptiveGamma({(8, 0): 1.0, (8, 1): 1.2}, prior=0.9)
    choices = _run(policy, 8, {0: 1.0, 1: 1.2}, 800)
    trials = [step for step in range(1, 799) if choices[step] == 0 and choices[step - 1]]
    assert [choices[step : step + 2] for step in trials] == [[0, 0]] * len(trials)
    assert trials[1] - trials[0] == AdaptiveGamma.MIN_INTERVAL
    lost = 2 * (1.0 - 1.2 / 2)  # two steps of 1.0 bring what one of 1.2 does
    paid = lost / (AdaptiveGamma.SHARES[0] * AdaptiveGamma.BUDGET * 1.2)
    assert trials[3] - trials[2] == pytest.approx(paid, rel=0.05)


def test_a_machine_that_slows_down_for_a_while_changes_no_choice():
    """Whatever gamma is in use then is not to blame."""
    true = {0: 1.0, 1: 1.3, 2: 1.4}
    policy = AdaptiveGamma({(8, gamma): seconds for gamma, seconds in true.items()}, prior=0.9)
    _run(policy, 8, true, 200)
    choices = _run(policy, 8, {gamma: 4 * seconds for gamma, seconds in true.items()}, 60)
    choices += _run(policy, 8, true, 400)
    assert choices.count(2) > 0.9 * len(choices)
    assert policy.seconds(8, 1) / policy.seconds(8, 2) == pytest.approx(1.3 / 1.4, rel=0.15)


def test_exploring_loses_its_part_of_the_time():
    """In steps that took what was expected, trials above and below cost together what was saved for them."""
    true = {0: 1.0, 1: 1.3, 2: 2.2}
    policy = AdaptiveGamma({(8, gamma): seconds for gamma, seconds in true.items()}, prior=0.9)
    choices = _run(policy, 8, true, 6000)
    lost = sum(true[gamma] - true[1] * (gamma + 1) / 2 for gamma in choices)  # every draft is kept
    assert lost == pytest.approx(AdaptiveGamma.BUDGET * sum(true[gamma] for gamma in choices), rel=0.25)


@pytest.mark.parametrize("loss", [0.0, 0.03, 0.07, 0.2])
def test_noise_costs_less_than_a_hundredth_where_no_draft_pays(loss):
    """Steps vary by 5% and first measurements are wrong by 4%; runs are short."""
    batch, kept, speeds = 16, 7, []
    tokens = [1.0, 1 + 7 / 16, 1 + 7 / 16 + (7 / 16) ** 2]
    true = {0: 1.0, 1: tokens[1] / (1 - loss), 2: tokens[2] / (0.95 - loss)}
    for seed in range(20):
        rng = random.Random(100 + seed)
        measured = {(batch, gamma): seconds * exp(rng.gauss(0, 0.04)) for gamma, seconds in true.items()}
        choices = _run(AdaptiveGamma(measured), batch, true, 700, noise=0.05, kept=kept, seed=seed)
        speeds.append(sum(tokens[gamma] for gamma in choices) / sum(true[gamma] for gamma in choices))
    assert sum(speeds) / len(speeds) > 0.99


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


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.37, 0.5, 0.9, 1.0])
def test_drafts_pay_exactly_beyond_the_break_even_acceptance(acceptance):
    # Planted costs at which drafts with this acceptance neither gain nor lose.
    gammas = range(1, 5)
    costs = {(4, 0): 3.0} | {(4, g): 3.0 * sum(acceptance**k for k in range(g + 1)) for g in gammas}

    needed = break_even_acceptance(costs)

    assert needed.keys() == {(4, g) for g in gammas}
    assert all(needed[4, g] == pytest.approx(acceptance, abs=1e-6) for g in gammas)


def test_no_acceptance_pays_for_drafts_that_cost_more_than_the_tokens_they_can_save():
    costs = {(1, 0): 1.0, (1, 1): 0.9, (1, 2): 3.1, (64, 0): 2.0, (64, 1): 4.2, (64, 2): 6.0}

    assert break_even_acceptance(costs) == {(1, 1): 0.0, (1, 2): None, (64, 1): None, (64, 2): 1.0}


def test_break_even_acceptance_refuses_costs_it_cannot_compare():
    with pytest.raises(ValueError, match=r"batches \[2\]"):
        break_even_acceptance({(1, 0): 1.0, (1, 1): 1.5, (2, 1): 1.5})
    with pytest.raises(ValueError, match="positive"):
        break_even_acceptance({(1, 0): 0.0, (1, 1): 1.5})
