"""A learning rate an order of magnitude off is noted, and no other."""

import pytest

from rlpipe.config.run import Config
from rlpipe.preflight.learning_rate import rate_note, usual_rate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("rate", "noted"), [(2e-4, False), (5e-3, True), (1e-6, True)])
def test_a_rate_far_from_that_of_the_models_size_is_noted(rate, noted):
    config = Config()
    config.trainer.lr = rate
    assert bool(rate_note(config)) == noted


def test_rates_that_are_known_to_work_are_not_far():
    for parameters, rate in ((2_400_000, 2e-4), (135_000_000, 2e-5), (7_000_000_000, 1e-6)):
        assert 0.25 < rate / usual_rate(parameters) < 4
