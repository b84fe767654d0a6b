"""Intervals, standard errors and quantiles that metrics, diagnosis, adaptation and the report share.

Owns every statistic that needs only the standard library, so that metrics and the report command start
without numpy. Statistics that need arrays (robust slopes, series correlated in time) are in
`rlpipe.diagnosis`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, expm1, hypot, nan, pi, sqrt
from statistics import NormalDist

Z95 = 1.96  # half width of a 95% interval, in standard errors


@dataclass(slots=True, frozen=True)
class Interval:
    """An estimate and the ends of its interval, which need not be symmetric or bounded."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """True when 0 is outside the interval."""
        return self.low > 0 or self.high < 0

    def covers(self, truth: float) -> bool:
        """Return whether the interval contains a number."""
        return self.low <= truth <= self.high

    def times(self, factor: float) -> Interval:
        """Return the interval multiplied by a factor; 0 times an unbounded end is 0."""
        ends = [end * factor if factor else 0.0 for end in (self.low, self.high)]
        return Interval(self.value * factor, min(ends), max(ends))

    def widened(self, *, down: float, up: float) -> Interval:
        """Return the interval widened by independent errors below and above, added in quadrature (MOVER)."""
        low, high = hypot(self.value - self.low, down), hypot(self.high - self.value, up)
        return Interval(self.value, self.value - low, self.value + high)

    def __sub__(self, other: Interval) -> Interval:
        """Return the interval of the difference of two independent estimates.

        Source: MOVER; for the difference of two rates it is Newcombe's interval (1998, method 10).
        """
        value = self.value - other.value
        down = hypot(self.value - self.low, other.high - other.value)
        up = hypot(self.high - self.value, other.value - other.low)
        return Interval(value, value - down, value + up)


@dataclass(slots=True, kw_only=True)
class Estimate:
    """An estimate with a symmetric interval of Student's t.

    value: nan without observations.
    se: standard error, nan if it is unknown.
    df: degrees of freedom.
    level: probability that the interval covers the true value, such as 0.99.
    """

    value: float
    se: float
    df: float
    level: float = 0.95

    @property
    def half_width(self) -> float:
        """Half the width of the interval; nan if the error is unknown."""
        return t_quantile((1 + self.level) / 2, self.df) * self.se

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self.half_width

    @property
    def interval(self) -> Interval:
        """The value and its interval, without standard error and degrees of freedom."""
        return Interval(self.value, self.low, self.high)


def cr1_error(sum_of_squares: float, clusters: int) -> float:
    """Return the standard error of a sum of residuals that are correlated within clusters.

        se = sqrt(G / (G - 1) * sum_g s_g^2),   s_g: sum of the residuals of cluster g

    Args:
        sum_of_squares: sum_g s_g^2 over all clusters.
        clusters: G.
    Returns:
        The error; nan below two clusters.
    Source: the cluster-robust variance of an intercept with the small-sample factor CR1 (MacKinnon and
        White 1985). With one residual in each cluster, the result divided by G is sd / sqrt(G).
    """
    return sqrt(clusters / (clusters - 1) * sum_of_squares) if clusters > 1 else nan


def wilson(rate: float, size: float) -> Interval:
    """Return the 95% interval of a rate over `size` independent trials (Wilson 1927).

    >>> interval = wilson(0.0, 8)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.0, 0.324)
    """
    z = Z95**2 / size
    middle = (rate + z / 2) / (1 + z)
    half_width = sqrt(z * rate * (1 - rate) + z * z / 4) / (1 + z)
    return Interval(rate, max(0.0, middle - half_width), min(1.0, middle + half_width))


def t_quantile(probability: float, df: float) -> float:
    """Return a quantile of Student's t, accurate to 1e-3 for df >= 3; nan for df < 1.

    Args:
        probability: above 1/2.
        df: degrees of freedom, need not be an integer.
    Source: Hill, CACM Algorithm 396 (1970), with its constants.

    >>> round(t_quantile(0.975, 10), 3), round(t_quantile(0.995, 27), 3), round(t_quantile(0.975, 1e9), 3)
    (2.228, 2.771, 1.96)
    """
    if not df >= 1:
        return nan
    two_tails = 2 * (1 - probability)

    # One and two degrees of freedom have closed forms.
    if df < 2:
        return cos(two_tails * pi / 2) / sqrt(1 - cos(two_tails * pi / 2) ** 2)
    if df < 2.5:
        return sqrt(2 / (two_tails * (2 - two_tails)) - 2)

    a = 1 / (df - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * sqrt(a * pi / 2) * df
    y = (d * two_tails) ** (2 / df)

    # Expand around the normal quantile, except far out in the tail.
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(two_tails / 2)
        y = x * x
        if df < 5:
            c += 0.3 * (df - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = a * y * y
        y = y + 0.5 * y * y if y <= 0.002 else expm1(y)
    else:
        y = ((1 / (((df + 6) / (df * y) - 0.089 * d - 0.822) * (df + 2) * 3) + 0.5 / (df + 4)) * y - 1) * (
            df + 1
        ) / (df + 2) + 1 / y
    return sqrt(df * y)
