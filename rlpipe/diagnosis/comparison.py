"""Summarizes several runs: the differences between arms that exceed chance.

Owns the readings of every arm and the sentences at the top of a comparison; `seeds` decides which runs form
an arm. An arm of several seeds has intervals over seeds. A single run has an interval only for its held-out
reward, over the instances; it covers the measurement error of this run, not the variation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rlpipe.diagnosis.held_out import PRIMARY, reward_intervals
from rlpipe.diagnosis.seeds import difference, over_seeds, pool_seeds
from rlpipe.diagnosis.summary import Summary
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval

LAST_STEPS = 10  # steps over which a gauge is averaged


def _last_mean(name: str) -> Callable[[RunData], float | None]:
    def value(run: RunData) -> float | None:
        values = run.series(name)[1][-LAST_STEPS:]
        return fmean(values) if values else None

    return value


def _last(run: RunData) -> float | None:
    values = run.series(PRIMARY)[1]
    return values[-1] if values else None


def _median_step(run: RunData) -> float | None:
    values = run.series("timing_s/step")[1]
    return median(values) if values else None


@dataclass(slots=True, frozen=True, kw_only=True)
class Measure:
    """A row of the comparison.

    of: returns the value for a run; None if there is none. spec: format of values.
    better: the word that describes an arm with a larger value.
    """

    label: str
    of: Callable[[RunData], float | None]
    spec: str = ".3f"
    better: str = "higher"


HELD_OUT = Measure(label="Held-out reward", of=_last)
MEASURES = (
    HELD_OUT,
    Measure(label="Training reward", of=_last_mean("critic/rewards/mean")),
    Measure(label="Tokens per verify step", of=_last_mean("spec/acceptance_length"), spec=".2f"),
    Measure(label="Seconds a step", of=_median_step, spec=".2f", better="slower"),
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Reading:
    """A measure in one arm. values: one per run. interval: None for a single run without an interval."""

    arm: str
    values: list[float]
    interval: Interval | None

    @property
    def mean(self) -> float:
        """Mean over the runs of the arm."""
        return fmean(self.values)

    def text(self, spec: str) -> str:
        """Format the mean with its interval."""
        if self.interval is None:
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} [{self.interval.low:{spec}}, {self.interval.high:{spec}}]"

    def minus(self, other: Reading) -> Interval | None:
        """Return the difference of two arms: by Welch's test over seeds, else from the two intervals."""
        if min(len(self.values), len(other.values)) > 1 and len({*self.values, *other.values}) > 2:
            return difference(self.values, other.values)
        if self.interval is None or other.interval is None:
            return None
        return self.interval - other.interval


def compare_runs(runs: Sequence[RunData]) -> Summary:
    """Summarize several runs: one sentence per measure, which compares each arm with the first arm."""
    arms = pool_seeds(runs)
    lines = [(m.label, _sentence(m, readings)) for m in MEASURES if (readings := readings_of(m, arms))]
    if lines:
        lines.append(("Intervals", _meaning(arms)))
    lines += [("Look at", sentence) for sentence in _incomplete(arms)]
    return Summary(lines=[line for line in lines if line[1]], findings=[])


def readings_of(measure: Measure, arms: Sequence[RunData]) -> list[Reading]:
    """Return the readings of all arms in which every run has the measure."""
    readings = []
    for arm in arms:
        values = [measure.of(run) for run in arm.seeds or [arm]]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            continue

        interval = None
        if measure is HELD_OUT:
            interval = reward_intervals(arm, PRIMARY)[-1]
        elif len(known) > 1:
            interval = over_seeds(known)
        readings.append(Reading(arm=arm.name, values=known, interval=interval))
    return readings


def _sentence(measure: Measure, readings: list[Reading]) -> str:
    """Describe the readings of a measure, and how each arm differs from the first arm."""
    listed = "; ".join(f"{r.arm}: {r.text(measure.spec)}" for r in readings)
    base, *others = readings
    if not others:
        return f"{listed}."

    clauses = []
    for reading in others:
        change = reading.minus(base)
        if change is None:
            size = f"{reading.mean - base.mean:+{measure.spec}}"
            clauses.append(f"{reading.arm} differs from {base.arm} by {size}; a single run has no interval")
            continue

        opposite = {"higher": "lower", "slower": "faster"}[measure.better]
        word = measure.better if change.low > 0 else opposite if change.high < 0 else ""
        outcome = f"is {word} than {base.arm} beyond chance" if word else f"against {base.arm}: undecided"
        ends = f"[{change.low:+{measure.spec}}, {change.high:+{measure.spec}}]"
        clauses.append(f"{reading.arm} {outcome}, {change.value:+{measure.spec}} {ends}")
    return f"{'; '.join(clauses)}. ({listed}.)"


def _incomplete(arms: Sequence[RunData]) -> Iterator[str]:
    """Yield warnings about arms in which a run has no step, or runs have different lengths."""
    if empty := [arm.name for arm in arms if not arm.steps]:
        yield f"{', '.join(empty)}: no step was recorded, so no arm contains it."
    for arm in arms:
        if len(steps := sorted({run.steps for run in arm.seeds})) > 1:
            yield f"Runs of {arm.name} end at different steps, {steps[0]} to {steps[-1]}."


def _meaning(arms: Sequence[RunData]) -> str:
    """Return a sentence on what the intervals of a comparison cover."""
    pooled, single = any(arm.seeds for arm in arms), any(not arm.seeds for arm in arms)
    parts = []
    if pooled:
        parts.append("over seeds (Student's t; of a difference Welch's) where an arm has several")
    if single:
        parts.append(
            "over held-out instances where it is a single run: they do not cover other seeds, so "
            "compare several (run.seed=0,1,2 --multirun)"
        )
    several = f", each of {len(arms) - 1} comparisons by itself" if len(arms) > 2 else ""
    return f"95%{several}; {'; '.join(parts)}."
