"""How often the intervals of a split of acceptance cover what they should, on runs whose truth is known.

    python scripts/bench/coverage.py --json scripts/bench/results/coverage.json

Every case is drawn `--draws` times with and without correlated residuals; nominal level .95. `rest` is what a
slope leaves, given that slope; `either` is the hull over both slopes, which must hold the rest of training's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlpipe.diagnosis.two_slopes import split_change
from rlpipe.metrics.statistics import Interval

STEPS, EARLY, WINDOW, SIGMA, WOBBLE = 120, 30, 15, 0.01, 0.06
WITHIN, WITHIN_ERROR = -0.3, 0.02
CASES = {  # correlation of residuals, noise of the entropy in its own deviations, slope between prompts
    "white": (0.0, 0.0, -0.3),
    "correlated .45": (0.45, 0.0, -0.3),
    "correlated .8": (0.8, 0.0, -0.3),
    "noisy entropy": (0.0, 1.0, -0.3),
    "prompt slope unlike training slope": (0.0, 0.0, -1.2),
    "unlike slopes, correlated .45": (0.45, 0.0, -1.2),
    "unlike slopes, noisy entropy": (0.0, 1.0, -1.2),
}


def correlated(rng: np.random.Generator, correlation: float, n: int) -> np.ndarray:
    """AR(1) of unit variance."""
    series = rng.standard_normal(n)
    for t in range(1, n):
        series[t] = correlation * series[t - 1] + np.sqrt(1 - correlation**2) * series[t]
    return series


def coverage(name: str, draws: int, seed: int = 7, mismatch: float = 0.0) -> dict[str, float]:
    """Shares of the draws of a case in which each interval holds the truth.

    Training moves the entropy by -0.2 nat along a slope of -0.3, prompts move it from step to step along
    theirs; mismatch: change that is not entropy's, which sets in after the early steps.
    """
    correlation, noise, between = CASES[name]
    rng = np.random.default_rng(seed)
    time = np.arange(STEPS) / STEPS
    spans = slice(None, EARLY), slice(STEPS - WINDOW, None)
    hits: dict[str, list[bool]] = {}
    for _ in range(draws):
        trained, prompts = -0.2 * time, WOBBLE * rng.standard_normal(STEPS)
        drift = mismatch * np.clip(np.arange(STEPS) - EARLY, 0, None) / (STEPS - EARLY)
        y = 0.9 + WITHIN * trained + between * prompts + drift
        y = y + SIGMA * correlated(rng, correlation, STEPS)
        entropy, second = (
            0.9 + trained + prompts + noise * WOBBLE * rng.standard_normal(STEPS) for _ in range(2)
        )
        slope = WITHIN + WITHIN_ERROR * rng.standard_normal()
        within = Interval(slope, slope - 1.96 * WITHIN_ERROR, slope + 1.96 * WITHIN_ERROR)
        found = split_change(
            y, entropy, second=second if noise else None, within=within, early=EARLY, window=WINDOW
        )
        moved, drifted = (s[spans[1]].mean() - s[spans[0]].mean() for s in (trained, drift))
        steps = found.by_slope["between steps"]
        seen = {
            "slope between steps": steps.slope.covers(between),
            "rest, between steps": steps.rest.covers(drifted + (WITHIN - between) * moved),
            "rest, within contexts": found.by_slope["within contexts"].rest.covers(drifted),
            "rest, either": found.hull.covers(drifted),
        }
        for key, value in seen.items():
            hits.setdefault(key, []).append(value)
        hits.setdefault("unbounded slopes", []).append(bool(np.isinf(steps.slope.low)))
    return {key: float(np.mean(value)) for key, value in hits.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--json", type=Path, metavar="OUT")
    given = parser.parse_args(arguments)
    cases = {
        f"{name}{', with mismatch' if mismatch else ''}": coverage(name, given.draws, mismatch=mismatch)
        for name in CASES
        for mismatch in (0.0, -0.05)
    }
    lowest = min(v for case in cases.values() for k, v in case.items() if k != "unbounded slopes")
    for name, case in cases.items():
        print(f"{name:50s}", "  ".join(f"{key} {value:.3f}" for key, value in case.items()))
    print(f"lowest {lowest:.4f}")
    if given.json:
        from harness import commit, write_result  # beside this file, which a test reads by its path

        report = {
            "commit": commit(),
            "command": "python scripts/bench/coverage.py " + " ".join(sys.argv[1:]),
            "draws": given.draws,
            "steps": STEPS,
            "early": EARLY,
            "window": WINDOW,
            "nominal": 0.95,
            "lowest": lowest,
            "cases": cases,
        }
        write_result(given.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
