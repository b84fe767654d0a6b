"""Exact Monte Carlo tests of samples whose distribution is known.

A test compares a statistic of the samples with the same statistic of simulated samples from the known
distribution. An exceedance is a simulated value at least as large as the observed one. Simulation stops after
h exceedances: if that takes l simulations, the p-value is h / l. If there are only g < h exceedances in the
maximum of n simulations, the p-value is (g + 1) / (n + 1) (Besag and Clifford 1991, "Sequential Monte Carlo
p-values"). The false-alarm rate is at most alpha for any number of simulations and of samples, even if the
counts in cells are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

STOP_AFTER = 10  # number of exceedances after which the simulation stops
SMALLEST = 1e-15  # lower bound of a cell's probability, which rounding could make zero or negative


def normal_quantile(alpha: float) -> float:
    """Return z with Pr(N(0, 1) > z) = alpha.

    >>> round(normal_quantile(0.025), 3)
    1.96
    """
    return -NormalDist().inv_cdf(alpha)


def normal_score(statistic: float, mean: float, variance: float) -> float:
    """Convert a statistic with this mean and variance to an approximate standard normal score.

    Used only for power. The statistic is treated as a scaled chi-square (Satterthwaite's degrees of freedom,
    Wilson and Hilferty's cube root).
    """
    freedom = 2 * mean**2 / variance
    spread = 2 / (9 * freedom)
    return (math.cbrt(statistic / mean) - (1 - spread)) / math.sqrt(spread)


def monte_carlo_p(
    observed: Sequence[float], simulate: Callable[[], Sequence[float]], *, max_simulations: int
) -> float:
    """Return the exact p-value of statistics that are large if the hypothesis is wrong.

    With several statistics, it is the smallest p-value times their number (Bonferroni). simulate: function
    that returns the statistics of one simulated sample.
    """
    limits = np.asarray(observed)
    exceeded, p_values = np.zeros(len(limits), int), np.zeros(len(limits))
    count = 0
    while count < max_simulations and (p_values == 0).any():
        count += 1
        exceeded += np.asarray(simulate()) >= limits
        ended = (exceeded == STOP_AFTER) & (p_values == 0)
        p_values[ended] = STOP_AFTER / count
    p_values[p_values == 0] = (exceeded[p_values == 0] + 1) / (max_simulations + 1)
    return min(1.0, len(limits) * float(p_values.min()))


def fisher_p(p_values: Sequence[float]) -> float:
    """Return the p-value of -2 sum ln p, a chi-square of 2 n degrees of freedom (Fisher's method).

    >>> round(fisher_p([0.05, 0.05]), 4)
    0.0175
    """
    half = -sum(math.log(p) for p in p_values)
    terms = np.cumprod(np.concatenate(([1.0], half / np.arange(1, len(p_values)))))
    return min(1.0, math.exp(-half) * float(terms.sum()))


def combined_p(p_values: Sequence[float]) -> float:
    """Combine independent p-values: return twice the smaller of Bonferroni's and Fisher's combination.

    Bonferroni's detects a fault at one position, Fisher's a small fault at all positions.
    """
    if len(p_values) == 1:
        return p_values[0]
    return min(1.0, 2 * min(len(p_values) * min(p_values), fisher_p(p_values)))


@dataclass(slots=True, kw_only=True)
class Draws:
    """Draws from known distributions (rows): draw i is from row `row[i]` and fell into cell `cell[i]`.

    probs: [rows, cells] float64, each row sums to 1. row, cell: [n].
    rounded: the rows computed in a server's dtype; None: `probs`. Samples are simulated from `rounded`, and
    their statistics use `probs`, so that the tests tolerate rounding.
    """

    probs: np.ndarray
    row: np.ndarray
    cell: np.ndarray
    rounded: np.ndarray | None = None
    _sizes: np.ndarray = field(init=False)
    _cumulative: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Compute the cumulative probabilities for simulation."""
        self.probs = np.maximum(self.probs, SMALLEST)
        self._sizes = np.bincount(self.row, minlength=len(self.probs))
        self._cumulative = _cumulative(self.probs if self.rounded is None else self.rounded)

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.row)

    def simulate(self, rng: np.random.Generator) -> np.ndarray:
        """Simulate the same number of draws from the same rows; return their cells, [n]."""
        return _draw(self._cumulative, self.row, self.probs.shape[1], rng)

    def simulate_from(self, probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Simulate the same number of draws from other rows of the same shape; return their cells, [n]."""
        return _draw(_cumulative(probs), self.row, probs.shape[1], rng)

    def g(self, cell: np.ndarray | None = None) -> float:
        """Compute the G statistic of the draws. cell: [n], use these cells instead."""
        cell = self.cell if cell is None else cell
        keys, counts = np.unique(self.row * self.probs.shape[1] + cell, return_counts=True)
        expected = self._sizes[keys // self.probs.shape[1]] * self.probs.ravel()[keys]
        return 2 * float((counts * np.log(counts / expected)).sum())

    def likelihood(self, cell: np.ndarray | None = None) -> float:
        """Compute sum ln p of the draws. cell: [n], use these cells instead."""
        cell = self.cell if cell is None else cell
        return float(np.log(self.probs[self.row, cell]).sum())

    def likelihood_moments(self) -> tuple[float, float]:
        """Return the exact mean and variance of sum ln p under the hypothesis."""
        true = self.probs if self.rounded is None else self.rounded
        logs = np.log(self.probs)
        mean = (true * logs).sum(1)
        variance = (true * (logs - mean[:, None]) ** 2).sum(1)
        return float(self._sizes @ mean), float(self._sizes @ variance)

    def p_value(self, rng: np.random.Generator, *, max_simulations: int) -> float:
        """Return an exact p-value: twice the smaller p-value of two tests; 1 if there are no draws.

        The G test detects any deviation if cells have large counts. The two-sided test of sum ln p detects
        tokens that are too likely or too unlikely, even if they are spread over many rows.
        """
        if not len(self):
            return 1.0
        mean = self.likelihood_moments()[0]

        def statistics(cell: np.ndarray) -> tuple[float, float]:
            return self.g(cell), abs(self.likelihood(cell) - mean)

        # Rounding may make equal sums differ in the last digit.
        observed = [value - 1e-9 for value in statistics(self.cell)]
        return monte_carlo_p(
            observed, lambda: statistics(self.simulate(rng)), max_simulations=max_simulations
        )

    def null_moments(self, rng: np.random.Generator, simulations: int) -> tuple[float, float]:
        """Return the mean and variance of G under the hypothesis, estimated by simulation."""
        null = np.array([self.g(self.simulate(rng)) for _ in range(simulations)])
        return float(null.mean()), float(null.var())


def _cumulative(probs: np.ndarray) -> np.ndarray:
    """Return the cumulative distributions of all rows as one increasing sequence, [rows * cells]."""
    steps = np.maximum(probs, 0).cumsum(1)
    steps /= steps[:, -1:]
    return (steps + np.arange(len(probs))[:, None]).ravel()


def _draw(cumulative: np.ndarray, row: np.ndarray, cells: int, rng: np.random.Generator) -> np.ndarray:
    index = np.searchsorted(cumulative, row + rng.random(len(row)), side="right")
    return np.minimum(index - row * cells, cells - 1)


def permutation_p(
    first: np.ndarray,
    second: np.ndarray,
    strata: tuple[np.ndarray, np.ndarray],
    rng: np.random.Generator,
    *,
    max_simulations: int,
) -> float:
    """Test whether two samples have the same ratio of sums; return the exact two-sided p-value.

    first, second: [n, 2], numerator and denominator of each member. strata: stratum of each member of the two
    samples; members are permuted only within a stratum.
    """
    both, labels = np.concatenate((first, second)), np.concatenate(strata)
    order = np.argsort(labels, kind="stable")
    both, labels = both[order], labels[order]
    is_first = np.concatenate((np.ones(len(first), bool), np.zeros(len(second), bool)))[order]

    def difference(mask: np.ndarray) -> float:
        (a, b), (c, d) = both[mask].sum(0), both[~mask].sum(0)
        return abs(a / max(b, 1) - c / max(d, 1))

    def simulate() -> list[float]:
        shuffled = np.lexsort((rng.random(len(both)), labels))
        return [difference(is_first[shuffled])]

    # Rounding may make equal differences differ in the last digit.
    return monte_carlo_p([difference(is_first) - 1e-12], simulate, max_simulations=max_simulations)
