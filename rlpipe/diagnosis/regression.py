"""Robust slope of one series on another, and means of short series, with honest intervals. numpy only.

Owns the statistics that the decomposition rests on; knows nothing of acceptance. Series come in order of
time: neighbours may be correlated, which widens intervals, and a few values may be wild, which must not turn
the slope.
"""

from __future__ import annotations

from math import nan, sqrt

import numpy as np

from rlpipe.metrics.statistics import Estimate, cr1_error

HUBER = 1.345  # residuals beyond this many scales are pulled in; 95% efficient for normal noise
MOST_CORRELATION = 0.9


def robust_slope(x: np.ndarray, y: np.ndarray, *, trend: bool = True, level: float = 0.99) -> Estimate:
    """Slope of y on x by Huber's M-estimator; x, y: [n] in order of time, n >= 6.

        minimise sum_t rho((y_t - a - slope x_t - c t) / s),   s = 1.4826 median |residual| (rescaled)

    trend: include c t, so that what grows with time beside x is not mistaken for an effect of x. The error
    is Huber's (Robust Statistics, 1981, Eq. 7.6.6) times (1 + r_x r_e) / (1 - r_x r_e), r being the lag-1
    autocorrelations of x (without trend) and of the residuals: the inflation for two AR(1) series.

    Raises ValueError for fewer than 6 points, or an x that does not vary: no slope can be told then.

    >>> x = np.arange(8.0) % 3
    >>> round(robust_slope(x, 1 - 2 * x).value, 9)
    -2.0
    """
    n = len(x)
    if n < 6 or len(y) != n:
        raise ValueError(f"a slope needs 6 points or more and as many of x as of y, got {n} and {len(y)}.")
    time = np.linspace(-1, 1, n)
    others = np.stack([np.ones(n), time], 1) if trend else np.ones((n, 1))
    own = x - others @ np.linalg.lstsq(others, x, rcond=None)[0]  # x without what the others explain
    spread = float(own @ own)
    if spread <= 1e-20 * max(1.0, float(np.square(x).sum())):
        raise ValueError(
            f"x does not vary over these {n} points: a slope on it cannot be told. Take more steps as early "
            "phase, or give a slope from elsewhere (contexts of the probe set)."
        )
    design = np.column_stack([x - x.mean(), others])
    coefficients, residuals = _huber(design, y)
    p, scale = design.shape[1], _scale(residuals, design.shape[1])
    df = float(n - p)
    if scale <= 1e-12 * max(1.0, float(np.abs(y).max())):
        return Estimate(value=float(coefficients[0]), se=0.0, df=df, level=level)
    psi = np.clip(residuals / scale, -HUBER, HUBER)
    inside = np.abs(residuals / scale) <= HUBER
    share = float(inside.mean())
    correction = 1 + p / n * (1 - share) / share
    variance = (correction * scale / share) ** 2 * float(psi @ psi) / df / spread
    product = autocorrelation(own) * autocorrelation(psi)
    variance *= (1 + product) / (1 - product)
    return Estimate(value=float(coefficients[0]), se=sqrt(variance), df=df, level=level)


def _huber(design: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and residuals, by iteratively reweighted least squares."""
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    for _ in range(50):
        residuals = y - design @ coefficients
        scale = _scale(residuals, design.shape[1])
        if scale == 0:
            break
        weights = np.sqrt(np.minimum(1, HUBER * scale / np.maximum(np.abs(residuals), 1e-300)))
        new = np.linalg.lstsq(design * weights[:, None], y * weights, rcond=None)[0]
        done = np.allclose(new, coefficients, rtol=1e-9, atol=1e-12)
        coefficients = new
        if done:
            break
    return coefficients, y - design @ coefficients


def _scale(residuals: np.ndarray, p: int) -> float:
    """Median absolute residual as a standard deviation; p of n residuals are fitted away."""
    n = len(residuals)
    return 1.4826 * float(np.median(np.abs(residuals))) * sqrt(n / (n - p))


def autocorrelation(series: np.ndarray) -> float:
    """Lag-1 autocorrelation within [0, 0.9], corrected for its bias of about (1 + 4 r) / n."""
    centred = series - series.mean()
    n, power = len(series), float(centred @ centred)
    if n < 4 or power == 0:
        return 0.0
    r = float(centred[1:] @ centred[:-1]) / power
    return min(MOST_CORRELATION, max(0.0, r + (1 + 4 * r) / n))


def error_of_mean(values: np.ndarray, *, fitted: int = 1) -> float:
    """Standard error of the mean of residuals in order of time; fitted: parameters they have lost.

    sqrt(sum e^2 / (n - fitted) / n * (1 + r) / (1 - r)); nan when nothing is left to estimate it from.
    """
    n = len(values)
    if n <= fitted:
        return nan
    r = autocorrelation(values)
    return sqrt(float(values @ values) / (n - fitted) / n * (1 + r) / (1 - r))


def clustered_error(residuals: np.ndarray, clusters: np.ndarray) -> float:
    """Standard error of a sum of residuals that are correlated within clusters (CR1); nan for one cluster."""
    labels, members = np.unique(clusters, return_inverse=True)
    sums = np.bincount(members, weights=residuals)
    return cr1_error(float(sums @ sums), len(labels))


def detrended(values: np.ndarray) -> np.ndarray:
    """What a straight line over time leaves of a series (3 points or more; else the mean)."""
    degree = 1 if len(values) > 2 else 0
    time = np.arange(len(values))
    return values - np.polyval(np.polyfit(time, values, degree), time)
