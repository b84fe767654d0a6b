"""Estimates and tests the temperature of samples with its sufficient statistic.

The distributions at all temperatures form an exponential family: p_T(x) is proportional to exp(z(x) / T). The
sum of ln p over the samples is sufficient for T. The test of the requested temperature is therefore exact and
the most powerful one. The maximum-likelihood temperature is the one at which the expected sum equals the
observed sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlpipe.certify.reference import FirstRows
from rlpipe.certify.statistics import SMALLEST, Draws, monte_carlo_p, normal_quantile

_LOWEST, _HIGHEST = 0.02, 20.0


@dataclass(slots=True, kw_only=True)
class Estimate:
    """An estimated temperature with its interval, and the p-value of the requested temperature."""

    value: float
    low: float
    high: float
    p: float

    def contains(self, temperature: float) -> bool:
        """Return whether the interval contains the temperature."""
        return self.low <= temperature <= self.high


def estimate(
    first: FirstRows,
    prompt: np.ndarray,
    token: np.ndarray,
    requested: float,
    rng: np.random.Generator,
    *,
    alpha: float,
    max_simulations: int,
) -> Estimate:
    """Test the requested temperature on first tokens. prompt, token: [n], prompt and class of each token."""
    # Leave out texts that no token has; their class is -1.
    known = token >= 0
    prompt, token = prompt[known], token[known]

    # The sum of ln p is the sufficient statistic of the temperature.
    probs = np.maximum(first.probs(requested), SMALLEST)
    score = np.log(probs)
    draws = Draws(probs=probs, rounded=first.probs(requested, rounded=True), row=prompt, cell=token)
    observed = float(score[prompt, token].sum())

    sizes = np.bincount(prompt, minlength=len(probs))

    def expected(temperature: float) -> float:
        at = first.probs(temperature, rounded=True)
        return float((sizes * (at * score).sum(1)).sum())

    # Compare the distance of the sum from its expectation with that of simulated samples.
    centre = expected(requested)
    p = monte_carlo_p(
        [abs(observed - centre) - 1e-9],
        lambda: [abs(float(score[prompt, draws.simulate(rng)].sum()) - centre)],
        max_simulations=max_simulations,
    )

    # The ends of the interval are the temperatures whose expected sum is one quantile from the observed sum.
    value = _solve(expected, observed)
    at = first.probs(value, rounded=True)
    mean = (at * score).sum(1, keepdims=True)
    deviation = float(np.sqrt((sizes * (at * (score - mean) ** 2).sum(1)).sum()))
    half = normal_quantile(alpha / 2) * deviation
    low, high = _solve(expected, observed + half), _solve(expected, observed - half)
    return Estimate(value=value, low=low, high=high, p=p)


def _solve(expected: Callable[[float], float], observed: float) -> float:
    """Return the temperature at which the expected sum equals the observed one; it falls with temperature."""
    low, high = _LOWEST, _HIGHEST
    for _ in range(40):
        middle = (low * high) ** 0.5
        if expected(middle) > observed:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
