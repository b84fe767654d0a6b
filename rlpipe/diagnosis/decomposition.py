"""Splits a change of acceptance into a part that entropy explains and a remainder (Bebop Eq. 16).

    Delta alpha_t = slope (H_t - H_0)  +  [Delta alpha_t - slope (H_t - H_0)]
                    entropy part          mismatch part

alpha is an acceptance rate (or a length; the parts then have its unit). H is the target's mean entropy in nat
per token. The slope is signed, in alpha per nat between *steps*, and is estimated from the early phase by
robust regression. Index 0 is the mean over the early phase. Index t is the mean over a window of steps,
because single steps are too noisy. The parts add up to the observed change exactly. Their errors combine the
error of the slope (times the change of entropy) and the errors of the two means.

Deviation from the paper: the early regression also has a linear trend in time. Without it, a mismatch that
grows while entropy falls would be mistaken for a slope. Assumptions: the relation is linear in the range of
H, and the early slope is valid later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from rlpipe.diagnosis.regression import detrended, error_of_mean, robust_slope
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Estimate

EARLY = 20  # steps of the early phase, at most half of the run
WINDOW = 10  # steps over which a change is averaged
LEVEL = 0.99
ENTROPY = "rollout/entropy"
RATE = "spec/acceptance_rate"
LENGTH = "spec/acceptance_length"


@dataclass(slots=True, kw_only=True)
class Decomposition:
    """Parts of the change between two spans of steps.

    early, window: first and last step of the two spans.
    slope: acceptance per nat.
    entropy_change: H of the window minus H of the early phase, nat.
    total: exactly entropy + mismatch; the errors of these two are correlated.
    """

    early: tuple[int, int]
    window: tuple[int, int]
    slope: Estimate
    entropy_change: float
    total: Estimate
    entropy: Estimate
    mismatch: Estimate


def decompose(
    steps: np.ndarray,
    acceptance: np.ndarray,
    entropy: np.ndarray,
    *,
    early: int | None = None,
    window: int = WINDOW,
    at: int | None = None,
    slope: Estimate | None = None,
    level: float = LEVEL,
) -> Decomposition:
    """Split the change of acceptance between the early phase and a window of steps.

    Args:
        steps, acceptance, entropy: [n], in ascending order of steps; entropy in nat.
        early: number of early steps; None: the smaller of `EARLY` and half of the run.
        window: number of steps that are averaged, ending with index `at` (None: the last).
        slope: a slope from another source; None: estimate it from the early phase.
        level: confidence level of the intervals.
    Raises:
        ValueError: lengths differ, `early` is outside 1..n, or the slope cannot be estimated (fewer than 6
            early points, or an entropy that does not vary).
    """
    steps, y, h = (np.asarray(series, dtype=float) for series in (steps, acceptance, entropy))
    n = len(steps)
    if not len(y) == len(h) == n or n < 2:
        raise ValueError(
            f"steps, acceptance and entropy must have one length of 2 or more, got {n}, {len(y)}, {len(h)}."
        )
    first = min(EARLY, n // 2) if early is None else early
    if not 1 <= first <= n:
        raise ValueError(f"early={first} must be between 1 and the {n} steps there are.")

    if slope is None:
        slope = robust_slope(h[:first], y[:first], level=level)
    df = slope.df
    end = n if at is None else at + 1
    late = slice(max(0, end - window), end)

    entropy_change = h[late].mean() - h[:first].mean()
    total = y[late].mean() - y[:first].mean()
    by_entropy = slope.value * entropy_change

    # The errors of the means and of the slope are assumed to be independent.
    error_of_means = hypot(_error(y[:first], h[:first], slope), _error(y[late], h[late], slope))
    error_of_slope = abs(entropy_change) * slope.se

    def part(value: float, se: float) -> Estimate:
        return Estimate(value=float(value), se=se, df=df, level=level)

    return Decomposition(
        early=(int(steps[0]), int(steps[first - 1])),
        window=(int(steps[late][0]), int(steps[late][-1])),
        slope=slope,
        entropy_change=float(entropy_change),
        total=part(total, error_of_means),
        entropy=part(by_entropy, error_of_slope),
        mismatch=part(total - by_entropy, hypot(error_of_means, error_of_slope)),
    )


def _error(acceptance: np.ndarray, entropy: np.ndarray, slope: Estimate) -> float:
    """Return the error of a span's mean acceptance after the effect of entropy and drift is removed."""
    residuals = detrended(acceptance - slope.value * entropy)
    if len(residuals) > 2:
        return error_of_mean(residuals, fitted=min(3, len(residuals) - 1))
    return error_of_mean(residuals)


def decompose_each(
    steps: np.ndarray, acceptance: np.ndarray, entropy: np.ndarray, *, level: float = LEVEL
) -> list[Decomposition]:
    """Decompose the change at every step after the first window, with the same slope (Bebop Fig. 3)."""
    slope = decompose(steps, acceptance, entropy, level=level).slope
    return [
        decompose(steps, acceptance, entropy, at=at, slope=slope, level=level)
        for at in range(min(WINDOW, len(steps)) - 1, len(steps))
    ]


def paired(run: RunData, name: str, other: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps at which both metrics were observed, and their values there."""
    rows = [
        (record["training/global_step"], record[name], record[other])
        for record in run.records
        if isinstance(record.get(name), (int, float)) and isinstance(record.get(other), (int, float))
    ]
    steps, values, other_values = np.ascontiguousarray(np.array(rows, dtype=float).reshape(-1, 3).T)
    return steps, values, other_values
