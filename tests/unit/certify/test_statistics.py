"""P-values are exact whatever the sizes of cells, and combine to exact ones."""

import numpy as np
import pytest

from rlpipe.certify.statistics import Draws, combined_p, fisher_p, monte_carlo_p, permutation_p
from tests.helpers.goodness_of_fit import g_statistic

pytestmark = pytest.mark.unit


def draws(law, size, rng, true=None, rounded=None):
    """`size` draws spread over the rows of a law, sampled from `true`."""
    row = np.arange(size) % len(law)
    blank = Draws(probs=law, row=row, cell=np.zeros(size, int), rounded=rounded)
    return Draws(
        probs=law, row=row, cell=blank.simulate_from(law if true is None else true, rng), rounded=rounded
    )


def test_g_of_draws_is_the_textbook_sum():
    rng = np.random.default_rng(0)
    some = draws(rng.dirichlet(np.ones(5), 3), 200, rng)
    counts = np.bincount(some.row * 5 + some.cell, minlength=15).reshape(3, 5)
    assert some.g() == pytest.approx(g_statistic(counts, some.probs))


def test_p_values_of_right_samples_are_uniform_even_with_one_draw_a_row():
    """150 samples of 40 draws from 40 rows of 30 cells: each share of p below x is within 4 deviations of x,
    or less (Bonferroni of two tests)."""
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.full(30, 0.3), 40)
    p = np.array([draws(law, 40, rng).p_value(rng, max_simulations=99) for _ in range(150)])
    for x in (0.05, 0.1, 0.3):
        assert (p <= x).mean() <= x + 4 * (x * (1 - x) / 150) ** 0.5
    assert (p <= 0.3).mean() > 0.1  # and the bound is not idle


def test_a_sharper_distribution_is_found_where_no_cell_has_two_draws():
    rng = np.random.default_rng(2)
    law = rng.dirichlet(np.ones(50), 800)
    sharper = law**1.5 / (law**1.5).sum(1, keepdims=True)
    assert draws(law, 800, rng, true=sharper).p_value(rng, max_simulations=999) == pytest.approx(0.002)


def test_what_rounding_moves_is_no_fault_and_the_rest_is():
    """The server's rows differ from the reference as its number format moves them."""
    rng = np.random.default_rng(3)
    law = rng.dirichlet(np.ones(10), 2)
    rounded = law * rng.uniform(0.7, 1.3, law.shape)
    rounded /= rounded.sum(1, keepdims=True)
    served = draws(law, 2_000, rng, true=rounded, rounded=rounded)
    assert served.p_value(rng, max_simulations=999) > 0.01
    assert Draws(probs=law, row=served.row, cell=served.cell).p_value(rng, max_simulations=999) < 0.01


def test_simulation_stops_early_and_the_p_value_counts_from_there():
    values = iter([1.0] * 50)
    assert monte_carlo_p([0.5], lambda: [next(values)], max_simulations=1000) == 1.0
    assert monte_carlo_p([2.0], lambda: [1.0], max_simulations=99) == 0.01


def test_several_statistics_pay_for_their_number():
    assert monte_carlo_p([2.0, 0.5], lambda: [1.0, 1.0], max_simulations=99) == 0.02


def test_fishers_p_value_is_that_of_the_product_of_uniforms():
    rng = np.random.default_rng(4)
    products = rng.random((200_000, 3)).prod(1)
    assert fisher_p([0.2, 0.1, 0.3]) == pytest.approx((products <= 0.2 * 0.1 * 0.3).mean(), abs=0.004)
    assert combined_p([0.4]) == 0.4
    assert combined_p([1e-6, 0.9, 0.9]) == pytest.approx(6e-6)


def test_permutation_sees_a_ratio_that_differs_and_not_one_that_strata_explain():
    rng = np.random.default_rng(5)

    def sample(rate, size):
        steps = rng.integers(5, 15, size)
        return np.stack((rng.binomial(steps * 3, rate), steps), 1)

    strata = np.repeat([0, 1], 60)
    mixed = np.concatenate((sample(0.3, 60), sample(0.7, 60)))
    again = np.concatenate((sample(0.3, 60), sample(0.7, 60)))
    wrong = np.concatenate((sample(0.36, 60), sample(0.76, 60)))
    assert permutation_p(mixed, again, (strata, strata), rng, max_simulations=499) > 0.01
    assert permutation_p(mixed, wrong, (strata, strata), rng, max_simulations=499) < 0.01
