"""Why acceptance changed: the part that entropy explains, and the part it does not (Bebop Eq. 16).

    Delta alpha_t = slope (H_t - H_0)  +  [Delta alpha_t - slope (H_t - H_0)]
                    entropy part          mismatch part

alpha is an acceptance rate (or a length; the unit carries through), H the mean entropy of the target in nat
per token, slope is signed, in alpha per nat between *steps*, and comes from the early phase by robust
regression. Index 0 is the mean over the early phase and t the mean over a window of steps: single steps are
too noisy to be a reference. The parts add up to the observed change exactly; their errors are of the slope
(times the change of entropy) and of the two means.

Deviation from the paper: the early regression has a linear trend in time as well (`trend=False` leaves it
out), otherwise a mismatch that grows while entropy falls is mistaken for a slope. Assumptions: the relation
is linear in the range of H, and the slope stays the early one. Whether it did is what fixed contexts can tell
(`attribution`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot

import numpy as np

from rlpipe.diagnosis.regression import detrended, error_of_mean, robust_slope
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Estimate

EARLY = 20  # steps of the early phase, at most half of the run
WINDOW = 10  # steps that a change is averaged over
LEVEL = 0.99
ENTROPY = "rollout/entropy"
RATE = "spec/acceptance_rate"
LENGTH = "spec/acceptance_length"


@dataclass(slots=True, kw_only=True)
class Decomposition:
    """Parts of the change between two spans of steps, (first, last) each.

    slope: acceptance per nat. total = entropy + mismatch, exactly; their errors are correlated.
    entropy_change: H of the window minus H of the early phase, nat.
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
    trend: bool = True,
    level: float = LEVEL,
) -> Decomposition:
    """Split the change of acceptance between the early phase and a window of steps.

    steps, acceptance, entropy: [n], ascending. early: steps of the early phase, None for `EARLY` or half of
    what there is. window: steps averaged, ending with index `at` (None: the last). slope: from elsewhere;
    None: from the early phase. Raises ValueError for fewer than 6 early points, or an entropy without
    variation, when the slope is to be found.
    """
    steps, y, h = (np.asarray(a, dtype=float) for a in (steps, acceptance, entropy))
    n = len(steps)
    if not len(y) == len(h) == n or n < 2:
        raise ValueError(
            f"steps, acceptance and entropy must have one length of 2 or more, got {n}, {len(y)}, {len(h)}."
        )
    first = min(EARLY, n // 2) if early is None else early
    if not 1 <= first <= n:
        raise ValueError(f"early={first} must be between 1 and the {n} steps there are.")
    slope = robust_slope(h[:first], y[:first], trend=trend, level=level) if slope is None else slope
    last = n if at is None else at + 1
    late = slice(max(0, last - window), last)
    moved, total = h[late].mean() - h[:first].mean(), y[late].mean() - y[:first].mean()
    noise = hypot(_error(y[:first], h[:first], slope), _error(y[late], h[late], slope))
    of_slope = abs(moved) * slope.se

    def part(value: float, se: float) -> Estimate:
        return Estimate(value=float(value), se=se, df=slope.df, level=level)

    by_entropy = slope.value * moved
    return Decomposition(
        early=(int(steps[0]), int(steps[first - 1])),
        window=(int(steps[late][0]), int(steps[late][-1])),
        slope=slope,
        entropy_change=float(moved),
        total=part(total, noise),
        entropy=part(by_entropy, of_slope),
        mismatch=part(total - by_entropy, hypot(noise, of_slope)),
    )


def _error(acceptance: np.ndarray, entropy: np.ndarray, slope: Estimate) -> float:
    """Error of a span's mean acceptance, given its entropy; drift within the span is no error."""
    left = detrended(acceptance - slope.value * entropy)
    if len(left) > 2:
        return error_of_mean(left, fitted=min(3, len(left) - 1))
    return error_of_mean(left)


def decompose_each(
    steps: np.ndarray, acceptance: np.ndarray, entropy: np.ndarray, **options: object
) -> list[Decomposition]:
    """The decomposition at every step from the end of the first window on, with one slope (Bebop Fig. 3)."""
    whole = decompose(steps, acceptance, entropy, **options)
    window = int(options.get("window", WINDOW))
    kept = {key: value for key, value in options.items() if key not in ("slope", "at")}
    return [
        decompose(steps, acceptance, entropy, at=at, slope=replace(whole.slope), **kept)
        for at in range(min(window, len(steps)) - 1, len(steps))
    ]


def acceptance_names(run: RunData) -> dict[str, str]:
    """Label -> metric of every acceptance the run observed: overall, and by depth."""
    depths = [name for name in run.names() if name.startswith(f"{RATE}/depth_")]
    depths.sort(key=lambda name: int(name.rpartition("_")[2]))
    found = {"overall": RATE, **{f"depth {name.rpartition('_')[2]}": name for name in depths}}
    return {label: name for label, name in found.items() if run.series(name)[0]}


def paired(run: RunData, name: str, other: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps at which both metrics were observed, and their values."""
    both = [
        (record["training/global_step"], record[name], record[other])
        for record in run.records
        if isinstance(record.get(name), (int, float)) and isinstance(record.get(other), (int, float))
    ]
    steps, a, b = (np.array(column, dtype=float) for column in zip(*both, strict=True)) if both else [[]] * 3
    return np.asarray(steps), np.asarray(a), np.asarray(b)


def split_over_time(run: RunData, end: Decomposition, points: int = 120) -> list[Decomposition]:
    """The change of the overall rate up to `points` steps of a run, along the slope of `end`."""
    series = paired(run, RATE, ENTROPY)
    count = len(series[0])
    stride = max(1, count // points)
    return [decompose(*series, at=at, slope=end.slope) for at in range(count - 1, 8, -stride)][::-1]


def decompose_run(run: RunData, **options: object) -> dict[str, Decomposition]:
    """Every acceptance rate the run observed, by label; {} for a run without drafts, or one too short."""
    found = {}
    for label, name in acceptance_names(run).items():
        series = paired(run, name, ENTROPY)
        if len(series[0]) >= 12:
            found[label] = decompose(*series, **options)
    return found
