"""The smallest fault that each line detects, found by simulating faults with a certificate's sample sizes.

Critical values come from the simulated mean and variance (`normal_score`). This approximation is accurate to
a few per cent of a fault's size; the tests do not use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpipe.certify.statistics import Draws, normal_quantile, normal_score

WANTED = 0.95
_SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
_CUTS = (0.999, 0.99, 0.98, 0.95, 0.9, 0.8)
_NULLS, _FAULTS = 60, 20


def smallest_mixture(draws: Sequence[Draws], alpha: float, rng: np.random.Generator) -> float | None:
    """Return the smallest share of tokens replaced by the likeliest token that is detected with power .95.

    draws: the tests; the fault is detected if one of them fails at level alpha. Returns None if no share up
    to a half is detected.
    """
    draws = [one for one in draws if len(one)]
    nulls = [one.null_moments(rng, _NULLS) for one in draws]
    for share in _SHARES:
        faulty = [_mixed(one.probs, share) for one in draws]
        if _power(draws, faulty, nulls, alpha, rng) >= WANTED:
            return share
    return None


def _mixed(probs: np.ndarray, share: float) -> np.ndarray:
    """Return the distributions that result if a share of samples is replaced by the likeliest token."""
    mixed = (1 - share) * probs
    mixed[np.arange(len(probs)), probs.argmax(1)] += share
    return mixed


def largest_cut(draws: Draws, alpha: float, rng: np.random.Generator) -> float | None:
    """Return the largest top-p of a server that is detected with power .95. draws: draws over bands."""
    null = draws.null_moments(rng, _NULLS)
    for cut in _CUTS:
        kept = np.clip(cut - (draws.probs.cumsum(1) - draws.probs), 0, draws.probs)
        faulty = kept / kept.sum(1, keepdims=True)
        if _power([draws], [faulty], [null], alpha, rng) >= WANTED:
            return cut
    return None


def _power(
    draws: Sequence[Draws],
    faulty: Sequence[np.ndarray],
    nulls: Sequence[tuple[float, float]],
    alpha: float,
    rng: np.random.Generator,
) -> float:
    """Return the share of simulated faulty samples for which at least one test fails at level alpha."""
    detected = 0
    for _ in range(_FAULTS):
        detected += any(
            _finds(one, one.simulate_from(probs, rng), null, alpha)
            for one, probs, null in zip(draws, faulty, nulls, strict=True)
        )
    return detected / _FAULTS


def _finds(draws: Draws, cell: np.ndarray, null: tuple[float, float], alpha: float) -> bool:
    """Return whether either test of `Draws.p_value` rejects these cells at level alpha, approximately."""
    mean, variance = null
    if variance > 0 and normal_score(draws.g(cell), mean, variance) > normal_quantile(alpha / 2):
        return True
    mean, variance = draws.likelihood_moments()
    return abs(draws.likelihood(cell) - mean) > normal_quantile(alpha / 4) * variance**0.5


def difference(error: float, alpha: float) -> float:
    """Return the difference that a two-sided test with this standard error detects with power .95."""
    return float((normal_quantile(alpha / 2) + normal_quantile(1 - WANTED)) * error)


def mixture_text(share: float | None) -> str:
    """Describe the power of a line that compares frequencies."""
    if share is None:
        return "less than half of the tokens replaced by the likeliest: not seen; take more samples"
    return f"{share:.1%} of the tokens replaced by the likeliest (power .95)"


def cut_text(cut: float | None) -> str:
    """Describe the power of the line on unlikely tokens."""
    if cut is None:
        return "top-p of .8 left on: not seen; take more samples"
    return f"top-p = {cut:g} left on (power .95)"
