"""Slopes and changes of means, with intervals, from short series that are noisy and correlated.

Owns the statistics that need arrays; independent of acceptance. Each kind of data needs a different error
estimate:

    robust_slope         a series in order of time with a few outliers       Huber's error, inflated for AR(1)
    instrumented_slope   a series with a regressor measured with noise       inverted test, maybe unbounded
    cross_section        contexts of several trajectories, in no order       clustered by trajectory (CR1)
    contrast             a weighted sum of a series in order of time         AR(1) about a smooth drift

Residuals of `instrumented_slope` and `contrast` are assumed to be AR(1) around a cubic in time. Their
estimated correlation is corrected for its bias in short series, and increased by one standard error. Every
estimate is linear in the residuals, so its variance w'Rw is exact for that correlation. Quantiles are
Student's.
"""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np

from rlpipe.metrics.statistics import Estimate, Interval, cr1_error, t_quantile

HUBER = 1.345  # residuals larger than this many scales get less weight; 95% efficient for normal noise
MAX_SERIES_CORRELATION = 0.9  # bound of the lag-1 correlation in the error of a robust slope or a mean
DRIFT_DEGREE = 3  # degree of the polynomial in time that describes drift
MAX_RESIDUAL_CORRELATION = 0.95  # bound of the correlation of residuals from that polynomial


def robust_slope(x: np.ndarray, y: np.ndarray, *, trend: bool = True, level: float = 0.99) -> Estimate:
    """Estimate the slope of y on x by Huber's M-estimator.

        minimise sum_t rho((y_t - a - slope x_t - c t) / s),   s = 1.4826 median |residual| (rescaled)

    The error is Huber's error times (1 + r_x r_e) / (1 - r_x r_e), the inflation for two AR(1) series. r_x
    and r_e are the lag-1 autocorrelations of x (without trend) and of the residuals.

    Args:
        x, y: [n] in order of time, n >= 6.
        trend: fit c t as well, so that a cause that grows with time is not mistaken for an effect of x.
        level: confidence level of the interval.
    Raises:
        ValueError: there are fewer than 6 points, or x does not vary.
    Source: Huber, Robust Statistics (1981), Eq. 7.6.6.

    >>> x = np.arange(8.0) % 3
    >>> round(robust_slope(x, 1 - 2 * x).value, 9)
    -2.0
    """
    n = len(x)
    if n < 6 or len(y) != n:
        raise ValueError(f"a slope needs 6 points or more and as many of x as of y, got {n} and {len(y)}.")

    # Only the part of x that intercept and trend do not explain identifies the slope.
    time = np.linspace(-1, 1, n)
    nuisance = np.stack([np.ones(n), time], 1) if trend else np.ones((n, 1))
    x_residual = x - nuisance @ np.linalg.lstsq(nuisance, x, rcond=None)[0]
    x_variation = float(x_residual @ x_residual)
    if x_variation <= 1e-20 * max(1.0, float(np.square(x).sum())):
        raise ValueError(
            f"x does not vary over these {n} points, so it has no slope. Take more steps as early phase, or "
            "pass a slope from another source (contexts of the probe set)."
        )

    design = np.column_stack([x - x.mean(), nuisance])
    coefficients, residuals = _huber_fit(design, y)
    parameters = design.shape[1]
    scale, df = _scale(residuals, parameters), float(n - parameters)
    if scale <= 1e-12 * max(1.0, float(np.abs(y).max())):
        return Estimate(value=float(coefficients[0]), se=0.0, df=df, level=level)

    psi = np.clip(residuals / scale, -HUBER, HUBER)
    share_inside = float((np.abs(residuals / scale) <= HUBER).mean())
    correction = 1 + parameters / n * (1 - share_inside) / share_inside
    variance = (correction * scale / share_inside) ** 2 * float(psi @ psi) / df / x_variation

    product = autocorrelation(x_residual) * autocorrelation(psi)
    variance *= (1 + product) / (1 - product)
    return Estimate(value=float(coefficients[0]), se=sqrt(variance), df=df, level=level)


def _huber_fit(design: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and residuals of a fit by iteratively reweighted least squares."""
    coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
    for _ in range(50):
        residuals = y - design @ coefficients
        scale = _scale(residuals, design.shape[1])
        if scale == 0:
            break

        weights = np.sqrt(np.minimum(1, HUBER * scale / np.maximum(np.abs(residuals), 1e-300)))
        updated = np.linalg.lstsq(design * weights[:, None], y * weights, rcond=None)[0]
        converged = np.allclose(updated, coefficients, rtol=1e-9, atol=1e-12)
        coefficients = updated
        if converged:
            break
    return coefficients, y - design @ coefficients


def _scale(residuals: np.ndarray, parameters: int) -> float:
    """Return the median absolute residual as a standard deviation, corrected for the fitted parameters."""
    n = len(residuals)
    return 1.4826 * float(np.median(np.abs(residuals))) * sqrt(n / (n - parameters))


def autocorrelation(series: np.ndarray) -> float:
    """Return the lag-1 autocorrelation within [0, 0.9], corrected for its bias of about (1 + 4 r) / n."""
    centred = series - series.mean()
    n, power = len(series), float(centred @ centred)
    if n < 4 or power == 0:
        return 0.0

    r = float(centred[1:] @ centred[:-1]) / power
    return min(MAX_SERIES_CORRELATION, max(0.0, r + (1 + 4 * r) / n))


def error_of_mean(values: np.ndarray, *, fitted: int = 1) -> float:
    """Return the standard error of the mean of residuals in order of time.

        sqrt(sum e^2 / (n - fitted) / n * (1 + r) / (1 - r)),   r: lag-1 autocorrelation

    Args:
        values: [n] residuals e.
        fitted: number of parameters that were fitted to obtain the residuals.
    Returns:
        The error; nan if n <= fitted.
    """
    n = len(values)
    if n <= fitted:
        return nan

    r = autocorrelation(values)
    return sqrt(float(values @ values) / (n - fitted) / n * (1 + r) / (1 - r))


def detrended(values: np.ndarray) -> np.ndarray:
    """Subtract a straight line over time from a series; with fewer than 3 points, subtract the mean."""
    degree = 1 if len(values) > 2 else 0
    time = np.arange(len(values))
    return values - np.polyval(np.polyfit(time, values, degree), time)


def clustered_error(residuals: np.ndarray, clusters: np.ndarray) -> float:
    """Return the standard error of a sum of residuals that are correlated within clusters.

    Args:
        residuals: [n].
        clusters: [n] labels.
    Returns:
        The error (`cr1_error`); nan for a single cluster.
    """
    labels, members = np.unique(clusters, return_inverse=True)
    sums = np.bincount(members, weights=residuals)
    return cr1_error(float(sums @ sums), len(labels))


def cross_section(y: np.ndarray, x: np.ndarray, clusters: np.ndarray, *, level: float = 0.99) -> Estimate:
    """Estimate the slope of y on x by least squares over clustered points.

    Args:
        y, x: [n], such as acceptance and entropy of contexts at one version, without drift between points.
            The slope then compares *tokens* (contexts of high and low entropy), and need not equal the slope
            between steps.
        clusters: [n] labels, such as the trajectory of each context.
        level: confidence level of the interval.
    Raises:
        ValueError: there are fewer than 3 clusters, or x does not vary.
    """
    groups = len(np.unique(clusters))
    centred = x - x.mean()
    power = float(centred @ centred)
    if groups < 3 or power == 0:
        raise ValueError(
            f"a slope across contexts needs 3 trajectories whose entropy varies, got {groups}: raise "
            "metrics.probe.contexts."
        )

    slope = float(centred @ y) / power
    scores = centred * (y - y.mean() - slope * centred)
    se = clustered_error(scores, clusters) / power
    return Estimate(value=slope, se=se, df=groups - 1, level=level)


def instrumented_slope(
    y: np.ndarray, x: np.ndarray, instrument: np.ndarray | None = None, *, early: int, level: float
) -> Interval:
    """Estimate the slope of y on x over the first steps, with a linear trend, if x is measured with errors.

    The interval inverts the test of each candidate slope b, so it is valid even if x hardly varies:

        {b : (z'(y - b x))^2 <= t^2 z'Rz s^2(b)},   z: the instrument, R: correlations of the residuals

    Args:
        y, x: [n] in order of time. All n steps are used to estimate the correlation of the residuals.
        instrument: [n], a second measurement of x with independent errors; None if x has no errors.
        early: number of first steps over which the slope is fitted.
        level: confidence level of the interval.
    Returns:
        The slope; its interval is unbounded if x hardly varies.
    Source: Anderson and Rubin (1949), Fieller (1954).
    """
    basis = _polynomials(early, 1)
    z = x if instrument is None else instrument
    y_early, x_early, z_early = (v[:early] - basis @ (basis.T @ v[:early]) for v in (y, x, z))
    zy, zx = float(z_early @ y_early), float(z_early @ x_early)
    if abs(zx) <= 1e-20:
        return Interval(0.0, -inf, inf)

    slope = zy / zx
    correlation, _ = _residual_noise(y - slope * x)
    lags = _lag_correlations(early, correlation)

    # A correlated series varies less about its trend than an independent series.
    freedom = early - float(np.sum(basis * (lags @ basis)))
    q = float(z_early @ lags @ z_early) * t_quantile((1 + level) / 2, early - 3) ** 2 / freedom
    low, high = _nonpositive_range(
        zx * zx - q * float(x_early @ x_early),
        -zy * zx + q * float(x_early @ y_early),
        zy * zy - q * float(y_early @ y_early),
    )
    return Interval(slope, low, high)


def _nonpositive_range(square: float, half_linear: float, constant: float) -> tuple[float, float]:
    """Solve square b^2 + 2 half_linear b + constant <= 0 for b; the real line if this is not an interval."""
    if square <= 0:
        return -inf, inf
    root = sqrt(max(0.0, half_linear * half_linear - square * constant))
    return (-half_linear - root) / square, (-half_linear + root) / square


def contrast(series: np.ndarray, weights: np.ndarray, *, level: float = 0.95) -> Interval:
    """Estimate a weighted sum of a series, such as the mean of its end minus the mean of its beginning.

    Args:
        series: [n] in order of time.
        weights: [n].
        level: confidence level of the interval.
    Returns:
        The estimate of weights'series. The interval uses Student's quantile for the effective number of
        independent values.
    """
    n = len(series)
    correlation, variance = _residual_noise(series)
    error = sqrt(variance * _correlated_power(weights[:, None], correlation))

    effective_df = max(3.0, n * (1 - correlation) / (1 + correlation) - 1)
    half_width, value = t_quantile((1 + level) / 2, effective_df) * error, float(weights @ series)
    return Interval(value, value - half_width, value + half_width)


def change_between(first: np.ndarray, last: np.ndarray, *, level: float) -> Interval:
    """Estimate the mean of one span of a series minus the mean of an earlier span.

    Errors are residuals from a straight line in each span. Their correlation is estimated from both spans,
    corrected for the fitted lines, and increased by one standard error, as in `contrast`.

    Args:
        first, last: [m], [n] in order of time, with at least three values.
        level: confidence level of the interval.
    """
    residuals = detrended(first), detrended(last)
    n, lines = len(first) + len(last), 4  # two parameters per span
    power = float(sum(r @ r for r in residuals))
    correlation = 0.0
    if power > 1e-24:
        measured = float(sum(r[1:] @ r[:-1] for r in residuals)) / power
        unbiased = (measured + lines / n) / (1 - min(0.5, 2 * lines / n))
        raised = unbiased + sqrt(max(0.0, 1 - min(1.0, unbiased**2)) / n)
        correlation = min(MAX_RESIDUAL_CORRELATION, max(0.0, raised))

    # A correlated series varies less about its line than an independent series.
    fitted = sum(_correlated_power(_polynomials(len(r), 1), correlation) for r in residuals)
    variance = power / max(1.0, n - fitted)
    of_means = sum(_correlated_power(np.full((len(r), 1), 1 / len(r)), correlation) for r in residuals)

    effective_df = max(3.0, n * (1 - correlation) / (1 + correlation) - lines)
    half_width = t_quantile((1 + level) / 2, effective_df) * sqrt(variance * of_means)
    value = float(last.mean() - first.mean())
    return Interval(value, value - half_width, value + half_width)


def thirds(n: int) -> np.ndarray:
    """Return the weights [n] with which `contrast` computes the mean of the last third minus the first."""
    weights, third = np.zeros(n), max(2, n // 3)
    weights[:third], weights[n - third :] = -1 / third, 1 / third
    return weights


def _residual_noise(series: np.ndarray) -> tuple[float, float]:
    """Estimate AR(1) correlation (increased by one standard error) and variance around a cubic drift."""
    n = len(series)
    basis = _polynomials(n, DRIFT_DEGREE)
    residuals = series - basis @ (basis.T @ series)
    power = float(residuals @ residuals)
    if power <= 1e-24:
        return 0.0, 0.0

    # With too few points the correlation cannot be estimated without the drift, so assume the largest.
    correlation = MAX_RESIDUAL_CORRELATION
    if n > DRIFT_DEGREE + 3:
        measured = float(residuals[1:] @ residuals[:-1]) / power
        unbiased = (measured + (DRIFT_DEGREE + 1) / n) / (1 - (DRIFT_DEGREE + 3) / n)
        raised = unbiased + sqrt(max(0.0, 1 - min(1.0, unbiased**2)) / n)
        correlation = min(MAX_RESIDUAL_CORRELATION, max(0.0, raised))

    return correlation, power / (n - _correlated_power(basis, correlation))


def _lag_correlations(n: int, correlation: float) -> np.ndarray:
    """Return the correlation matrix [n, n] of an AR(1) series."""
    return correlation ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))


def _correlated_power(columns: np.ndarray, correlation: float) -> float:
    """Sum w'Rw over columns w [n, m] in n log n operations; R: correlation matrix of an AR(1) series."""
    n = len(columns)
    spectrum = np.fft.rfft(columns, 2 * n, axis=0)
    lagged = np.fft.irfft(np.abs(spectrum) ** 2, 2 * n, axis=0)[:n].sum(1)  # sum_t w_t w_{t+k}, by lag k
    weights = 2 * correlation ** np.arange(n)
    weights[0] = 1
    return float(weights @ lagged)


def _polynomials(n: int, degree: int) -> np.ndarray:
    """Return orthonormal polynomials of time, [n, degree + 1]."""
    return np.linalg.qr(np.vander(np.linspace(-1, 1, n), degree + 1))[0]
