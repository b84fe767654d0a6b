"""The change of acceptance beside the change of entropy, along two slopes that need not agree.

    change = slope (H_late - H_early) + rest

Owns the split and its intervals; says nothing of causes. The slope `between_steps` comes from means of early
steps, where prompts differ; `within_contexts` from the places of one probe, where the model is one. Neither
is what acceptance does when training moves the entropy, so the rest is given for each slope, and `hull` is
the interval that holds for whichever is right: only a rest on one side of 0 there is a finding.

Intervals. Residuals are taken as AR(1) around a smooth drift (a cubic over the run); their correlation is
corrected for its bias in short series and raised by one standard error; every estimate is linear in the
residuals, so its variance w'Rw is exact given that. Quantiles are Student's at the effective size. Entropy
may be measured with noise (SGLang reports -log p of the sampled token): a second measurement of the same
steps serves as an instrument, and the interval of the slope inverts the test of each candidate (Anderson and
Rubin 1949; Fieller 1954), so it is right, maybe unbounded, where entropy hardly moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from rlpipe.diagnosis.attribution import cross_section
from rlpipe.diagnosis.decomposition import ENTROPY, RATE, paired
from rlpipe.diagnosis.fixed_contexts import pool, rule_of
from rlpipe.diagnosis.probe import read_probes
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval, t_quantile

EARLY, WINDOW, FEWEST, LEVEL = 30, 15, 24, 0.95
SECOND_ENTROPY = "actor/entropy"  # the trainer's, of the same tokens
DRIFT = 3  # degree of the polynomial that stands for drift
MOST_CORRELATION = 0.95


@dataclass(slots=True, frozen=True, kw_only=True)
class Split:
    """One slope, acceptance per nat, what of the change lies along it, and the rest given this slope."""

    slope: Interval
    along: Interval
    rest: Interval


@dataclass(slots=True, frozen=True, kw_only=True)
class Splits:
    """All splits of one change. by_slope: "between steps", "within contexts". entropy_change: in nat."""

    early: tuple[int, int]
    late: tuple[int, int]
    change: Interval
    entropy_change: float
    by_slope: dict[str, Split]

    @property
    def hull(self) -> Interval:
        """The rest, whichever slope is right: from the lowest end to the highest."""
        rests = [split.rest for split in self.by_slope.values()]
        middle = sum(rest.value for rest in rests) / len(rests)
        return Interval(middle, min(rest.low for rest in rests), max(rest.high for rest in rests))


def split_change(
    acceptance: np.ndarray,
    entropy: np.ndarray,
    *,
    second: np.ndarray | None = None,
    within: Interval | None = None,
    early: int | None = None,
    window: int | None = None,
    level: float = LEVEL,
    steps: np.ndarray | None = None,
) -> Splits:
    """Split the change between the first `early` steps and the last `window`; series [n] in order of time.

    second: another measurement of the entropy. within: the slope across contexts, from a probe. Raises
    ValueError below 24 steps.
    """
    y, h = np.asarray(acceptance, dtype=float), np.asarray(entropy, dtype=float)
    n = len(y)
    if n < FEWEST or len(h) != n:
        raise ValueError(f"a split needs {FEWEST} steps or more with acceptance and entropy, got {n}.")
    first, last = early or min(EARLY, n // 3), window or min(WINDOW, n // 4)
    weights = np.zeros(n)
    weights[:first], weights[n - last :] = -1 / first, 1 / last
    found = between_steps(y, h, second, early=first, level=level)
    slopes = {"between steps": found} | ({"within contexts": within} if within else {})
    moved = float(weights @ h)
    at = np.arange(1, n + 1) if steps is None else steps
    return Splits(
        early=(int(at[0]), int(at[first - 1])),
        late=(int(at[n - last]), int(at[-1])),
        change=contrast(y, weights, level),
        entropy_change=moved,
        by_slope={name: _along(y, h, weights, slope, moved, level) for name, slope in slopes.items()},
    )


def _along(
    y: np.ndarray, h: np.ndarray, weights: np.ndarray, slope: Interval, moved: float, level: float
) -> Split:
    """Errors of slope and means are independent and added as squares, side by side (MOVER)."""
    along = slope.times(moved)
    rest = contrast(y - slope.value * h, weights, level)
    rest = rest.widened(down=along.high - along.value, up=along.value - along.low)
    return Split(slope=slope, along=along, rest=rest)


def between_steps(
    acceptance: np.ndarray,
    entropy: np.ndarray,
    second: np.ndarray | None = None,
    *,
    early: int,
    level: float = LEVEL,
) -> Interval:
    """Slope over the first `early` steps, with a linear trend beside; second: an instrument against noise.

    The set of b with (z'(y - b x))^2 <= t^2 z'Rz s^2(b); unbounded where entropy hardly moves.
    """
    y, x = acceptance[:early], entropy[:early]
    basis = _polynomials(early, 1)
    y, x, z = (v - basis @ (basis.T @ v) for v in (y, x, x if second is None else second[:early]))
    a, b = float(z @ y), float(z @ x)
    if abs(b) <= 1e-20:
        return Interval(0.0, -inf, inf)
    value = a / b
    correlation, _ = _noise(acceptance - value * entropy)
    lags = _lags(early, correlation)
    freedom = early - float(np.sum(basis * (lags @ basis)))  # a correlated series varies less about its trend
    q = float(z @ lags @ z) * t_quantile((1 + level) / 2, early - 3) ** 2 / freedom
    return Interval(
        value, *_roots(b * b - q * float(x @ x), -a * b + q * float(x @ y), a * a - q * float(y @ y))
    )


def _roots(square: float, half: float, constant: float) -> tuple[float, float]:
    """Where square b^2 + 2 half b + constant <= 0; everything when that is no interval."""
    if square <= 0:
        return -inf, inf
    root = sqrt(max(0.0, half * half - square * constant))
    return (-half - root) / square, (-half + root) / square


def contrast(series: np.ndarray, weights: np.ndarray, level: float = LEVEL) -> Interval:
    """weights'series with its interval, for residuals as the module says."""
    correlation, variance = _noise(series)
    n = len(series)
    error = sqrt(variance * float(weights @ _lags(n, correlation) @ weights))
    size = max(3.0, n * (1 - correlation) / (1 + correlation) - 1)
    half, value = t_quantile((1 + level) / 2, size) * error, float(weights @ series)
    return Interval(value, value - half, value + half)


def _noise(series: np.ndarray) -> tuple[float, float]:
    """AR(1) correlation, raised by a standard error, and variance of what a cubic drift leaves."""
    n = len(series)
    basis = _polynomials(n, DRIFT)
    left = series - basis @ (basis.T @ series)
    power = float(left @ left)
    if power <= 1e-24:
        return 0.0, 0.0
    correlation = MOST_CORRELATION
    if n > DRIFT + 3:  # fewer say nothing of it once the drift is taken away
        measured = float(left[1:] @ left[:-1]) / power
        unbiased = (measured + (DRIFT + 1) / n) / (1 - (DRIFT + 3) / n)
        raised = unbiased + sqrt(max(0.0, 1 - min(1.0, unbiased**2)) / n)
        correlation = min(MOST_CORRELATION, max(0.0, raised))
    lags = _lags(n, correlation)
    return correlation, power / (n - float(np.sum(basis * (lags @ basis))))


def _lags(n: int, correlation: float) -> np.ndarray:
    return correlation ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))


def _polynomials(n: int, degree: int) -> np.ndarray:
    """[n, degree + 1] orthonormal polynomials of time."""
    return np.linalg.qr(np.vander(np.linspace(-1, 1, n), degree + 1))[0]


def split_run(run: RunData, level: float = LEVEL) -> Splits | None:
    """The splits of a run's acceptance rate; None without drafts, or below 24 steps."""
    steps, rate, entropy = paired(run, RATE, ENTROPY)
    if len(steps) < FEWEST:
        return None
    other, trained, _ = paired(run, SECOND_ENTROPY, RATE)
    second = trained if len(other) == len(steps) and (other == steps).all() else None
    return split_change(
        rate, entropy, second=second, within=within_contexts(run, level), level=level, steps=steps
    )


def within_contexts(run: RunData, level: float = LEVEL) -> Interval | None:
    """Slope across the fixed contexts of the first probe, all depths; None without a probe."""
    rule = rule_of(run)
    for head, tables in read_probes(run.path)[:1]:
        pooled = pool(tables[: head["fixed"]], rule, None)
        try:
            slope = cross_section(pooled.alpha, pooled.entropy, pooled.clusters, level)
        except ValueError:  # too few trajectories, or entropies that are all alike
            return None
        if isfinite(slope.half_width):
            return slope.interval
    return None
