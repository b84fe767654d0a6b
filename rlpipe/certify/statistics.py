"""Exact tests of samples whose distribution is known, by Monte Carlo.

A test compares a statistic with the same statistic of samples that are simulated from the known distribution.
With h exceedances in l simulations the p-value is h / l, and (g + 1) / (n + 1) where n simulations had g < h
exceedances (Besag and Clifford 1991, "Sequential Monte Carlo p-values"). Its false-alarm rate is at most the
stated alpha for any number of simulations and any number of samples: no cell has to be large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

STOP_AFTER = 10  # exceedances after which a p-value is known well enough
SMALLEST = 1e-15  # probability of a cell that rounding would make zero or negative


def normal_quantile(alpha: float) -> float:
    """Return z with Pr(N(0, 1) > z) = alpha.

    >>> round(normal_quantile(0.025), 3)
    1.96
    """
    return -NormalDist().inv_cdf(alpha)


def normal_score(statistic: float, mean: float, variance: float) -> float:
    """Read a statistic as a chi-square of that mean and variance, as a standard normal score.

    Satterthwaite's degrees of freedom and Wilson and Hilferty's cube root: an approximation, for power only.
    """
    freedom = 2 * mean**2 / variance
    spread = 2 / (9 * freedom)
    return (math.cbrt(statistic / mean) - (1 - spread)) / math.sqrt(spread)


def monte_carlo_p(
    observed: Sequence[float], simulate: Callable[[], Sequence[float]], *, max_simulations: int
) -> float:
    """Return the exact p-value of statistics that are large when the hypothesis is wrong.

    With several, their number times the least of their p-values (Bonferroni). simulate: the statistics of one
    simulated sample.
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
    """Combine independent p-values: twice the lesser of Bonferroni's and Fisher's.

    The first sees one wrong position, the second a small fault at all of them.
    """
    if len(p_values) == 1:
        return p_values[0]
    return min(1.0, 2 * min(len(p_values) * min(p_values), fisher_p(p_values)))


@dataclass(slots=True, kw_only=True)
class Draws:
    """Draws from known rows: draw i is from row `row[i]` and fell into cell `cell[i]`.

    probs: [rows, cells] float64, each row sums to 1. row, cell: [n].
    rounded: the rows as a server's number format computes them; samples are simulated from these and judged
    by `probs`, so that rounding of that size is not a fault. None: `probs`.
    """

    probs: np.ndarray
    row: np.ndarray
    cell: np.ndarray
    rounded: np.ndarray | None = None
    _sizes: np.ndarray = field(init=False)
    _cumulative: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Prepare simulation."""
        self.probs = np.maximum(self.probs, SMALLEST)
        self._sizes = np.bincount(self.row, minlength=len(self.probs))
        self._cumulative = _cumulative(self.probs if self.rounded is None else self.rounded)

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.row)

    def simulate(self, rng: np.random.Generator) -> np.ndarray:
        """Return cells of as many draws from the same rows, [n]."""
        return _draw(self._cumulative, self.row, self.probs.shape[1], rng)

    def simulate_from(self, probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return cells of as many draws from other rows of the same shape, [n]."""
        return _draw(_cumulative(probs), self.row, probs.shape[1], rng)

    def g(self, cell: np.ndarray | None = None) -> float:
        """Compute G of the draws, or of others from the same rows."""
        cell = self.cell if cell is None else cell
        keys, counts = np.unique(self.row * self.probs.shape[1] + cell, return_counts=True)
        expected = self._sizes[keys // self.probs.shape[1]] * self.probs.ravel()[keys]
        return 2 * float((counts * np.log(counts / expected)).sum())

    def likelihood(self, cell: np.ndarray | None = None) -> float:
        """Compute sum ln p of the draws, or of others from the same rows."""
        cell = self.cell if cell is None else cell
        return float(np.log(self.probs[self.row, cell]).sum())

    def likelihood_moments(self) -> tuple[float, float]:
        """Return mean and variance of sum ln p under the hypothesis, exactly."""
        true = self.probs if self.rounded is None else self.rounded
        logs = np.log(self.probs)
        mean = (true * logs).sum(1)
        variance = (true * (logs - mean[:, None]) ** 2).sum(1)
        return float(self._sizes @ mean), float(self._sizes @ variance)

    def p_value(self, rng: np.random.Generator, *, max_simulations: int) -> float:
        """Return an exact p-value: twice the lesser of two tests'; 1 where there is no draw.

        G sees any deviation where cells are large. Sum ln p, two-sided, sees tokens that are too likely or
        too unlikely, however many rows they are spread over.
        """
        if not len(self):
            return 1.0
        mean = self.likelihood_moments()[0]

        def statistics(cell: np.ndarray) -> tuple[float, float]:
            return self.g(cell), abs(self.likelihood(cell) - mean)

        # Equal sums may differ in the last digit.
        observed = [value - 1e-9 for value in statistics(self.cell)]
        return monte_carlo_p(
            observed, lambda: statistics(self.simulate(rng)), max_simulations=max_simulations
        )

    def null_moments(self, rng: np.random.Generator, simulations: int) -> tuple[float, float]:
        """Return mean and variance of G under the hypothesis, by simulation."""
        null = np.array([self.g(self.simulate(rng)) for _ in range(simulations)])
        return float(null.mean()), float(null.var())


def _cumulative(probs: np.ndarray) -> np.ndarray:
    """Return the distribution functions of all rows as one increasing sequence, [rows * cells]."""
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
    """Return the exact two-sided p-value that two samples have one ratio of sums.

    first, second: [n, 2], numerator and denominator of each member. strata: of each member of the two;
    members are exchanged within a stratum only.
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

    # Equal differences may differ in the last digit.
    return monte_carlo_p([difference(is_first) - 1e-12], simulate, max_simulations=max_simulations)
