"""Limits of single settings: what they let through, and how they name what they refuse."""

from types import SimpleNamespace

import pytest

from rlpipe.config.limits import at_least, learning_rates, positive, share

pytestmark = pytest.mark.unit


def test_values_on_a_limit_pass():
    at_least(1, SimpleNamespace(a=1, b=2), "run", "a", "b")
    positive(SimpleNamespace(a=1e-9), "run", "a")
    share(SimpleNamespace(a=0, b=1), "run", "a", "b")
    learning_rates(SimpleNamespace(min_lr=0.5, lr=0.5), "run")


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        (lambda s: at_least(1, s, "run", "one", "zero"), "run.zero=0 must be at least 1."),
        (
            lambda s: at_least(0, s, "run", "low", remedy="0 is off"),
            "run.low=-0.1 must be at least 0: 0 is off.",
        ),
        (lambda s: positive(s, "run", "one", "zero"), "run.zero=0 must be positive."),
        (lambda s: share(s, "run", "zero", "low"), "run.low=-0.1 must be a share from 0 to 1."),
        (lambda s: share(s, "run", "high"), "run.high=1.1 must be a share from 0 to 1."),
        (lambda s: learning_rates(s, "run"), "run.min_lr=0.2 must lie in 0..run.lr=0.1."),
    ],
)
def test_the_first_setting_beyond_a_limit_is_named_with_its_value(refuse, message):
    settings = SimpleNamespace(one=1, zero=0, low=-0.1, high=1.1, min_lr=0.2, lr=0.1)
    with pytest.raises(ValueError) as refused:
        refuse(settings)
    assert str(refused.value) == message
