"""Splits the change of acceptance since the early phase into causes, at every step.

    total = entropy + mismatch + staleness + contexts          (mean of the last steps - mean of the first)

    entropy    slope (H_late - H_early), where H is the mean entropy of the sampled tokens
    mismatch   change of the draft's quality on the fixed contexts of the probe set: D alpha* - slope D H*
    staleness  acceptance by the engine minus acceptance by the newest weights, for the same drafts; 0 if no
               trajectory was stale and no difference was measured
    contexts   the remainder: contexts that are easier or harder to draft for than their entropy predicts

Owns the spans, the parts and their 95% intervals, per depth and overall. The controller emits them with
every step (`acceptance_split/*`). Summary, plots, TensorBoard, W&B, Prometheus and console all show these
numbers. A part that was not measured is absent. Without a probe set, `mismatch` is the change minus entropy
and staleness, and there is no `contexts`.

The slope is measured by an intervention if there is one (`metrics.probe.slope`). Otherwise it is estimated
across the fixed contexts of the first probe, and between the early steps. If both estimates exist, the values
use the first one, and a part's interval covers the results of both.

Flow: values of a step -> `see`, tables of a probe -> `probed`; then `at` or `metrics`. `of_run` replays a
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import numpy as np

from rlpipe.diagnosis.decomposition import ENTROPY, RATE, Decomposition
from rlpipe.diagnosis.fixed_contexts import decompose_between, pool, rule_of
from rlpipe.diagnosis.probe import ProbeTable, read_probes
from rlpipe.diagnosis.regression import (
    change_between,
    cross_section,
    detrended,
    instrumented_slope,
    robust_slope,
)
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval, t_quantile
from rlpipe.metrics.values import Last, Value

STEP = "training/global_step"
LEVEL = 0.95
EARLY_STEPS = "acceptance_split/early_steps"
MAX_STALENESS = "training/off_policy/trajectory_staleness/max"
SECOND_ENTROPY = "actor/entropy"  # entropy of the same tokens, measured by the trainer
MAX_EARLY, MIN_EARLY, MIN_WINDOW = 20, 6, 3
PARTS = ("total", "entropy", "mismatch", "staleness", "contexts")
OVERALL = 0  # instead of a depth
MAX_NOISE = 0.1  # maximal noise of an entropy relative to its variation; flattens a slope by one percent


def early_steps(planned: int) -> int:
    """Return the number of early steps in a run of `planned` steps: a third of them, but 6 to 20."""
    return max(MIN_EARLY, min(MAX_EARLY, planned // 3))


@dataclass(slots=True, frozen=True, kw_only=True)
class Split:
    """The change between two spans of steps.

    early, late: first and last step of each span. entropy_change: nat.
    parts: the measured parts, by their names in `PARTS`; `total` is the sum of the others.
    slopes: acceptance per nat, by source; the values of the parts use the first slope.
    rests: for each slope, the change minus the part that this slope attributes to entropy.
    """

    early: tuple[int, int]
    late: tuple[int, int]
    entropy_change: float
    parts: dict[str, Interval]
    slopes: dict[str, Interval]
    rests: dict[str, Interval]

    @property
    def total(self) -> Interval:
        """The total change of the acceptance rate."""
        return self.parts["total"]

    def causes(self) -> dict[str, Interval]:
        """Return the parts without `total`."""
        return {name: part for name, part in self.parts.items() if name != "total"}


@dataclass(slots=True)
class _Fixed:
    """Fixed contexts at one depth.

    slope: slope of acceptance on entropy, across the contexts of the first probe.
    changes: changes from that probe (at step `first_step`) to each later probe.
    """

    slope: Interval
    first_step: int
    changes: list[Decomposition] = field(default_factory=list)


class AcceptanceSplit:
    """Splits the change of acceptance, from the values of a run in order of steps.

    early: number of early steps. rule: column of a probe that predicts the engine's acceptance. slope:
    measured by an intervention; None if not measured.
    """

    def __init__(self, *, early: int, rule: str, slope: Interval | None = None) -> None:
        self.early, self._rule, self._slope = early, rule, slope
        self.window = max(MIN_WINDOW, early // 2)
        self._rows: dict[int, list[tuple[float, float, float, float]]] = {}  # step, rate, entropy, second
        self._first: tuple[int, list[ProbeTable]] | None = None
        self._fixed: dict[int, _Fixed] = {}
        self._stale: dict[int, list[tuple[float, float, float]]] = {}  # step, staleness, its error
        self._between: dict[int, Interval | None] = {}
        self._fresh: set[int] = set()  # steps without a stale trajectory

    @property
    def depths(self) -> list[int]:
        """OVERALL and the observed depths."""
        return sorted(self._rows)

    def see(self, record: Mapping[str, Any]) -> None:
        """Add the values of a step."""
        step, entropy = record[STEP], record.get(ENTROPY)
        second = _number(record.get(SECOND_ENTROPY))
        if isinstance(entropy, (int, float)):
            for name, rate in record.items():
                if name.startswith(RATE) and isinstance(rate, (int, float)):
                    self._rows.setdefault(_depth(name), []).append((step, rate, entropy, second))

        if record.get(MAX_STALENESS) == 0:
            self._fresh.add(step)

        # Depth 1 has a separate metric name, as in older runs.
        if (stale := record.get("probe/staleness")) is not None:
            self._stale.setdefault(1, []).append((step, stale, _number(record.get("probe/staleness_se"))))
        for name, stale in record.items():
            if name.startswith("probe/staleness/") and stale is not None and not name.endswith("/depth_1"):
                error = record.get(name.replace("staleness/", "staleness_se/"))
                self._stale.setdefault(_depth(name), []).append((step, stale, _number(error)))

    def probed(self, step: int, tables: list[ProbeTable]) -> None:
        """Add the fixed contexts of a probe."""
        if not tables:
            return
        if self._first is None:
            self._first = step, tables
            for depth in range(tables[0].values[self._rule].shape[1] + 1 if len(tables) > 2 else 0):
                pooled = pool(tables, self._rule, depth or None)
                if len(pooled.alpha) > 2 and np.ptp(pooled.entropy):
                    slope = cross_section(pooled.alpha, pooled.entropy, pooled.clusters, level=LEVEL)
                    self._fixed[depth] = _Fixed(slope.interval, step)
            return

        first_step, first_tables = self._first
        depths = first_tables[0].values[self._rule].shape[1]
        same = [_with_depths(table, depths) for table in tables]
        for depth, fixed in self._fixed.items():
            before, after = (pool(t, self._rule, depth or None) for t in (first_tables, same))
            if len(before.alpha) == len(after.alpha):
                spans = (first_step, step)
                fixed.changes.append(decompose_between(before, after, steps=spans, level=LEVEL))

    def at(self, depth: int, step: float = float("inf")) -> Split | None:
        """Split the change up to a step; return None in the early phase, or if there is no slope."""
        rows = np.array([row for row in self._rows.get(depth, []) if row[0] <= step]).reshape(-1, 4)
        first, late = rows[: self.early], rows[max(self.early, len(rows) - self.window) :]
        if len(first) < self.early or len(late) < MIN_WINDOW:
            return None
        slopes = self._slopes(depth, first)
        if not slopes:
            return None

        spans = [(int(span[0, 0]), int(span[-1, 0])) for span in (first, late)]
        entropy_change = float(late[:, 2].mean() - first[:, 2].mean())
        fixed, stale = self._fixed_change(depth, spans), self._staleness(depth, spans)

        # The interval of a part covers the results of all slopes; its value uses the first slope.
        by_slope = [_parts(first, late, slope, fixed=fixed, staleness=stale) for slope in slopes.values()]
        parts = {
            name: Interval(
                part.value, min(p[name].low for p in by_slope), max(p[name].high for p in by_slope)
            )
            for name, part in by_slope[0].items()
        }
        rests = {
            name: _change(first, late, slope.value).widened(
                down=_up(slope.times(entropy_change)), up=_down(slope.times(entropy_change))
            )
            for name, slope in slopes.items()
        }
        return Split(
            early=spans[0],
            late=spans[1],
            entropy_change=entropy_change,
            parts={"total": _change(first, late, 0.0), **parts},
            slopes=slopes,
            rests=rests,
        )

    def metrics(self) -> dict[str, Value]:
        """Return the split of the newest step as metrics of this step; {} in the early phase."""
        metrics: dict[str, Value] = {}
        for depth in self.depths:
            if (split := self.at(depth)) is None:
                continue
            for part, interval in split.parts.items():
                ends = {"low": interval.low, "high": interval.high}
                if depth == OVERALL:
                    metrics[f"acceptance_split/{part}"] = Last(interval.value)
                    for end, value in ends.items():
                        metrics[f"acceptance_split/{part}/{end}"] = Last(value)
                else:
                    metrics[f"acceptance_split/{part}/depth_{depth}"] = Last(interval.value)
                    for end, value in ends.items():
                        metrics[f"acceptance_split/{part}/depth_{depth}/{end}"] = Last(value)
        if metrics:
            metrics["acceptance_split/early_steps"] = Last(self.early)
        return metrics

    def standing_staleness(self) -> Interval | None:
        """Return the mean staleness at depth 1 over all probes; None for fewer than 6 probes."""
        readings = [r for r in self._stale.get(1, []) if isfinite(r[2])]
        return _mean(readings) if len(readings) >= 6 else None

    def probes(self) -> int:
        """Return the number of probes with fixed contexts and staleness at depth 1."""
        return min(len(self._fixed[1].changes) + 1, len(self._stale.get(1, []))) if 1 in self._fixed else 0

    def _slopes(self, depth: int, first: np.ndarray) -> dict[str, Interval]:
        """Return the estimates of acceptance per nat of entropy, by their source."""
        if self._slope is not None:
            return {"measured by intervention": self._slope}

        slopes = {"within contexts": self._fixed[depth].slope} if depth in self._fixed else {}
        # The early phase is over, so the slope between its steps no longer changes.
        if depth not in self._between:
            self._between[depth] = _slope_between(first)
        if (between := self._between[depth]) is not None:
            slopes["between steps"] = between
        return {name: slope for name, slope in slopes.items() if isfinite(slope.low + slope.high)}

    def _fixed_change(self, depth: int, spans: Sequence[tuple[int, int]]) -> tuple[Interval, float] | None:
        """Return the changes of acceptance and entropy on fixed contexts; None if a span has no probe."""
        if depth not in self._fixed:
            return None
        fixed, (early, late) = self._fixed[depth], spans
        readings = [(fixed.first_step, 0.0, 0.0)]
        readings += [(c.window[0], c.total.value, c.entropy_change) for c in fixed.changes]
        before = [r for r in readings if r[0] <= early[1]]
        after = _late(readings, early, late)
        if not before or not after:
            return None

        alpha, entropy = (
            float(np.mean([r[k] for r in after]) - np.mean([r[k] for r in before])) for k in (1, 2)
        )
        # The error comes from the choice of contexts, which is the same in every probe.
        last = [c for c in fixed.changes if c.window[0] <= late[1]][-1]
        error = last.total.half_width
        return Interval(alpha, alpha - error, alpha + error), entropy

    def _staleness(self, depth: int, spans: Sequence[tuple[int, int]]) -> Interval | None:
        """Return the change of staleness; None unless both spans have a reading with an error."""
        early, late = spans
        readings = [r for r in self._stale.get(depth, []) if isfinite(r[2])]
        before, after = [r for r in readings if r[0] <= early[1]], _late(readings, early, late)
        if not before or not after:
            return None

        # Engines that have the newest weights differ only by the coins of verification: do not pass this
        # noise on to the remainder. A clear change shows that weights did not arrive, so it stays.
        change = _mean(after) - _mean(before)
        if change.low <= 0 <= change.high and all(step in self._fresh for step, _, _ in [*before, *after]):
            return Interval(0.0, 0.0, 0.0)
        return change


def of_run(run: RunData) -> AcceptanceSplit:
    """Replay a run; the result has the same numbers as the run emitted."""
    recorded = run.series(EARLY_STEPS)[1]
    slope = ((run.settings.get("metrics") or {}).get("probe") or {}).get("slope")
    split = AcceptanceSplit(
        early=int(recorded[-1]) if recorded else early_steps(run.planned_steps or run.steps),
        rule=rule_of(run),
        slope=Interval(*slope) if slope else None,
    )
    for record in run.records:
        split.see(record)
    for head, tables in read_probes(run.path) if not run.seeds else []:
        split.probed(head["step"], tables[: head["fixed"]])
    return split


def _slope_between(first: np.ndarray) -> Interval | None:
    """Return the slope between the early steps; None if its interval is unbounded.

    Noise in the entropy would flatten the slope, so a second measurement of the entropy is the instrument. If
    the result is unbounded, a robust slope on the first measurement is used, unless the two measurements
    differ so much that noise would flatten this slope.
    """
    rate, entropy, second = first[:, 1], first[:, 2], first[:, 3]
    if np.isfinite(second).all():
        slope = instrumented_slope(rate, entropy, second, early=len(first), level=LEVEL)
        if isfinite(slope.low) and isfinite(slope.high):
            return slope
        noise, variation = (float(np.std(detrended(x))) for x in (entropy - second, entropy))
        if noise > MAX_NOISE * variation:
            return None
    try:
        return robust_slope(entropy, rate, level=LEVEL).interval
    except ValueError:
        return None


def _parts(
    first: np.ndarray,
    late: np.ndarray,
    slope: Interval,
    *,
    fixed: tuple[Interval, float] | None,
    staleness: Interval | None,
) -> dict[str, Interval]:
    """Return the parts for one slope. fixed: changes of acceptance and entropy on fixed contexts."""
    entropy_change = float(late[:, 2].mean() - first[:, 2].mean())
    rest = _change(first, late, slope.value)
    parts = {"entropy": slope.times(entropy_change)}
    known = [("staleness", staleness)] if staleness is not None else []

    if fixed is not None:
        change, fixed_entropy = fixed
        known.append(("fixed", Interval(*(x - slope.value * fixed_entropy for x in _ends(change)))))
        parts["mismatch"] = change - slope.times(fixed_entropy)
        entropy_change -= fixed_entropy

    # The remainder has the errors of all subtracted parts, and the slope's error only once.
    for _, part in known:
        rest = rest - part
    error = slope.times(entropy_change)
    rest = rest.widened(down=_up(error), up=_down(error))
    parts["contexts" if fixed is not None else "mismatch"] = rest
    return parts if staleness is None else parts | {"staleness": staleness}


def _change(first: np.ndarray, late: np.ndarray, slope: float) -> Interval:
    """Return the change of acceptance minus slope times entropy between two spans of rows."""
    spans = [span[:, 1] - slope * span[:, 2] for span in (first, late)]
    return change_between(*spans, level=LEVEL)


def _late(
    readings: Sequence[tuple[float, float, float]], early: tuple[int, int], late: tuple[int, int]
) -> list[tuple[float, float, float]]:
    """Return the readings of the late span, or, if fewer than two, the last two after the early phase."""
    behind = [r for r in readings if early[1] < r[0] <= late[1]]
    within = [r for r in behind if r[0] >= late[0]]
    return within if len(within) > 1 else behind[-2:]


def _mean(readings: Sequence[tuple[float, float, float]]) -> Interval:
    """Average independent readings (step, value, error); each error has two degrees of freedom."""
    value = float(np.mean([r[1] for r in readings]))
    se = sqrt(sum(r[2] ** 2 for r in readings)) / len(readings)
    half_width = t_quantile((1 + LEVEL) / 2, 2 * len(readings)) * se
    return Interval(value, value - half_width, value + half_width)


def _with_depths(table: ProbeTable, depths: int) -> ProbeTable:
    """Return a table restricted to the depths of the first probe; `draft.depths` may have changed since."""
    values = {name: column[:, :depths] for name, column in table.values.items()}
    return ProbeTable(trajectory_id=table.trajectory_id, positions=table.positions, values=values)


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _down(interval: Interval) -> float:
    return interval.value - interval.low


def _up(interval: Interval) -> float:
    return interval.high - interval.value


def _depth(name: str) -> int:
    """Return the depth in a metric's name; OVERALL if the metric is over all depths.

    >>> _depth("spec/acceptance_rate/depth_2"), _depth("spec/acceptance_rate")
    (2, 0)
    """
    _, _, depth = name.rpartition("depth_")
    return int(depth) if depth.isdecimal() else OVERALL


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
