"""The change of acceptance split by entropy along two slopes that need not agree.

    change = slope (H_late - H_early) + remainder

Owns the split and its intervals; names no causes. The slope `between steps` comes from means of early steps,
where prompts differ; `within contexts` from the contexts of one probe, where the model is one. Neither is the
slope that holds when training moves the entropy, so the remainder is computed for each slope, and `hull` is
the interval that holds for whichever is right: only a remainder on one side of 0 there is a finding.

Entropy may be measured with noise (SGLang reports -log p of the sampled token): the trainer's measurement of
the same tokens serves as an instrument (`regression.instrumented_slope`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlpipe.diagnosis.regression import contrast, instrumented_slope
from rlpipe.metrics.statistics import Interval

EARLY, WINDOW = 30, 15  # steps of the two spans, at most a third and a quarter of the run
MIN_STEPS, LEVEL = 24, 0.95
SECOND_ENTROPY = "actor/entropy"  # the trainer's, of the same tokens


@dataclass(slots=True, frozen=True, kw_only=True)
class Split:
    """The change along one slope.

    slope: acceptance per nat.
    along: the slope times the change of entropy.
    rest: the change minus `along`.
    """

    slope: Interval
    along: Interval
    rest: Interval


@dataclass(slots=True, frozen=True, kw_only=True)
class Splits:
    """The splits of one change.

    early, late: first and last step of the two spans.
    change: of the acceptance rate.
    entropy_change: nat.
    by_slope: keys "between steps" and, with a probe, "within contexts".
    """

    early: tuple[int, int]
    late: tuple[int, int]
    change: Interval
    entropy_change: float
    by_slope: dict[str, Split]

    @property
    def hull(self) -> Interval:
        """The remainder, whichever slope is right: from the lowest end to the highest."""
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
    """Split the change between the first `early` steps and the last `window`.

    Args:
        acceptance, entropy: [n] in order of time; entropy in nat.
        second: [n] another measurement of the entropy.
        within: the slope across contexts, from a probe.
        early, window: numbers of steps; None: `EARLY` and `WINDOW`, less for a short run.
        level: of the intervals.
        steps: [n] numbers of the steps; None: 1, 2, ...
    Raises:
        ValueError: below 24 steps.
    """
    y, h = np.asarray(acceptance, dtype=float), np.asarray(entropy, dtype=float)
    n = len(y)
    if n < MIN_STEPS or len(h) != n:
        raise ValueError(f"a split needs {MIN_STEPS} steps or more with acceptance and entropy, got {n}.")

    first, last = early or min(EARLY, n // 3), window or min(WINDOW, n // 4)
    weights = np.zeros(n)
    weights[:first], weights[n - last :] = -1 / first, 1 / last
    entropy_change = float(weights @ h)

    slopes = {"between steps": instrumented_slope(y, h, second, early=first, level=level)}
    if within:
        slopes["within contexts"] = within

    by_slope = {}
    for name, slope in slopes.items():
        # The errors of slope and means are independent.
        along = slope.times(entropy_change)
        rest = contrast(y - slope.value * h, weights, level=level)
        rest = rest.widened(down=along.high - along.value, up=along.value - along.low)
        by_slope[name] = Split(slope=slope, along=along, rest=rest)

    numbers = np.arange(1, n + 1) if steps is None else steps
    return Splits(
        early=(int(numbers[0]), int(numbers[first - 1])),
        late=(int(numbers[n - last]), int(numbers[-1])),
        change=contrast(y, weights, level=level),
        entropy_change=entropy_change,
        by_slope=by_slope,
    )
