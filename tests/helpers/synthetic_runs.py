"""Runs made up from a law that is known: acceptance = a + slope H + mismatch + noise, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOISES = ("normal", "correlated", "heavy")


@dataclass(slots=True, kw_only=True)
class SyntheticRun:
    """Series [n] by step, and the truth behind them.

    observed, current, fixed: acceptance of the engine, of the trainer's version on the same contexts, and of
    that version on fixed contexts, each with its own noise; entropy, fixed_entropy: on those contexts.
    mismatch, contexts, staleness: the true effects by step, staleness in `observed` alone.
    """

    slope: float
    sigma: float
    entropy: np.ndarray
    fixed_entropy: np.ndarray
    mismatch: np.ndarray
    contexts: np.ndarray
    staleness: np.ndarray
    observed: np.ndarray
    current: np.ndarray
    fixed: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """1, 2, ..., n."""
        return np.arange(1, len(self.entropy) + 1)

    def change(self, series: np.ndarray, early: int, window: int) -> float:
        """True change of an effect between the early phase and the last steps."""
        return float(series[-window:].mean() - series[:early].mean())


def synthetic_run(
    rng: np.random.Generator,
    *,
    entropy_drift: float = 0.0,
    mismatch_drift: float = 0.0,
    contexts_drift: float = 0.0,
    staleness_drift: float = 0.0,
    slope: float = -0.3,
    sigma: float = 0.01,
    noise: str = "normal",
    steps: int = 120,
    early: int = 30,
    wobble: float = 0.06,
) -> SyntheticRun:
    """A run whose entropy wobbles by `wobble` nat throughout and drifts after the early phase.

    *_drift: total change of each effect, linear from the end of the early phase on (the mismatch grows
    from the first step). noise: see `NOISES`; all have standard deviation sigma.
    """
    late = np.clip((np.arange(steps) - early) / (steps - early), 0, None)
    always = np.arange(steps) / steps
    shared = _noise(rng, "correlated", steps) * wobble
    fixed_entropy = 0.9 + entropy_drift * late + 0.3 * shared
    entropy = 0.9 + entropy_drift * late + shared
    mismatch, contexts, stale = mismatch_drift * always, contexts_drift * late, staleness_drift * late
    fixed = 0.95 + slope * fixed_entropy + mismatch
    current = 0.95 + slope * entropy + mismatch + contexts
    return SyntheticRun(
        slope=slope,
        sigma=sigma,
        entropy=entropy,
        fixed_entropy=fixed_entropy,
        mismatch=mismatch,
        contexts=contexts,
        staleness=stale,
        observed=current + stale + sigma * _noise(rng, noise, steps),
        current=current + sigma * _noise(rng, noise, steps),
        fixed=fixed + sigma * _noise(rng, noise, steps),
    )


def _noise(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """Unit variance: white, AR(1) with 0.3, or Student's t with 3 degrees of freedom."""
    if kind == "heavy":
        return rng.standard_t(3, n) / np.sqrt(3)
    white = rng.standard_normal(n)
    if kind == "correlated":
        for t in range(1, n):
            white[t] = 0.3 * white[t - 1] + np.sqrt(1 - 0.3**2) * white[t]
    return white


def oracle_half_widths(run: SyntheticRun, early: int, window: int, quantile: float) -> tuple[float, float]:
    """Half widths for entropy and mismatch part of one who knows sigma, and that the noise is white.

    Least squares of acceptance on entropy over the early phase, without a trend, normal quantile.
    """
    h = run.entropy[:early]
    moved = run.entropy[-window:].mean() - h.mean()
    of_slope = abs(moved) * run.sigma / np.sqrt(np.square(h - h.mean()).sum())
    noise = run.sigma * np.sqrt(1 / early + 1 / window)
    return quantile * of_slope, quantile * float(np.hypot(noise, of_slope))
