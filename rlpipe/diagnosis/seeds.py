"""Groups the compared runs into arms. An arm is the seeds of one configuration.

Owns the grouping of runs, the names of arms (the settings that differ) and the records of an arm (means over
its seeds). The intervals of an arm are over seeds (Student's t), because a run is only one sample of its
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.runs import RunData, flat_settings
from rlpipe.metrics.statistics import Z95, Estimate, Interval, t_quantile

SEED = "run.seed"
SAME = ("run.dir", "metrics.")  # settings that do not distinguish arms


def differing(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value in each run ("–": absent)."""
    flat = [flat_settings(run.settings) for run in runs]
    values = {name: [str(f.get(name, "–")) for f in flat] for name in sorted(set().union(*flat))}
    return {name: row for name, row in values.items() if name != "run.dir" and len(set(row)) > 1}


def name_by_settings(runs: Sequence[RunData]) -> None:
    """Name the runs of a sweep (with numbered directories) by the settings that differ."""
    texts = _texts(runs, {n: row for n, row in differing(runs).items() if not n.startswith(SAME)})
    for run, text in zip(runs, texts, strict=True):
        if run.name.isdecimal() and text:
            run.name = text


def pool_seeds(runs: Sequence[RunData]) -> list[RunData]:
    """Return the arms of a comparison: runs that differ only in run.seed become one arm, their mean.

    Runs with the same seed stay separate, because they are not independent. Runs without a finished step also
    stay separate, because they have no values to average.
    """
    by_settings: dict[str, list[RunData]] = {}
    for run in runs:
        flat = flat_settings(run.settings)
        key = repr(sorted((n, str(v)) for n, v in flat.items() if n != SEED and not n.startswith(SAME)))
        alone = not flat or not run.steps
        by_settings.setdefault(f"alone: {run.path}" if alone else key, []).append(run)

    groups: list[list[RunData]] = []
    for group in by_settings.values():
        seeds = [flat_settings(run.settings).get(SEED) for run in group]
        groups += [group] if len(set(seeds)) == len(group) else [[run] for run in group]

    # An arm is named by its settings; a single run keeps its name.
    first = [group[0] for group in groups]
    between = {n: row for n, row in differing(first).items() if n != SEED and not n.startswith(SAME)}
    texts = _texts(first, between)
    return [
        group[0] if len(group) == 1 else _mean_of(group, f"{text} ({len(group)} seeds)".strip())
        for group, text in zip(groups, texts, strict=True)
    ]


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean over seeds with its 95% interval of Student's t.

    >>> over_seeds([0.4, 0.6])
    Interval(value=0.5, low=-0.77..., high=1.77...)
    """
    se = stdev(values) / sqrt(len(values))
    return Estimate(value=fmean(values), se=se, df=len(values) - 1).interval


def difference(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Return mean(one) - mean(other) with Welch's 95% interval; each needs at least two seeds."""
    a, b = (stdev(values) ** 2 / len(values) for values in (one, other))
    freedom = (a + b) ** 2 / (a * a / (len(one) - 1) + b * b / (len(other) - 1)) if a + b else 1.0
    return Estimate(value=fmean(one) - fmean(other), se=sqrt(a + b), df=freedom).interval


def _texts(runs: Sequence[RunData], rows: dict[str, list[str]]) -> list[str]:
    """Return "key=value" texts for every run; a key is shortened to its last part if this is unique."""
    tails = [name.rpartition(".")[2] for name in rows]
    keys = [tail if tails.count(tail) == 1 else name for name, tail in zip(rows, tails, strict=True)]
    return [
        ", ".join(f"{key}={row[n]}" for key, row in zip(keys, rows.values(), strict=True))
        for n in range(len(runs))
    ]


def _mean_of(runs: list[RunData], name: str) -> RunData:
    """Return the arm of these runs; at every step it has the means of the metrics that all seeds observed."""
    by_step = [{record[STEP]: record for record in run.records} for run in runs]
    shared = sorted(set.intersection(*map(set, by_step)))
    records = [_mean_record([steps[step] for steps in by_step]) for step in shared]

    # Use the parent directory of the runs, because an arm has no rollouts or probes.
    return replace(
        runs[0], path=runs[0].path.parent, name=name, records=records, events=[], trajectories=[], seeds=runs
    )


def _mean_record(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of one step's records over seeds, with error bars over seeds."""
    mean: dict[str, Any] = {STEP: records[0][STEP]}
    for name in set.intersection(*map(set, records)) - {STEP}:
        values = [record[name] for record in records]
        if all(isinstance(value, (int, float)) for value in values):
            mean[name] = fmean(values)
        elif all(isinstance(value, dict) and value["edges"] == values[0]["edges"] for value in values):
            counts = [sum(bins) for bins in zip(*(value["counts"] for value in values), strict=True)]
            mean[name] = {"edges": values[0]["edges"], "counts": counts}

    # With this scale, 1.96 standard errors are the half width of the interval over seeds.
    scale = t_quantile(0.975, len(records) - 1) / Z95 / sqrt(len(records))
    for name in mean:
        if name.endswith("_se") and (measured := name.removesuffix("_se")) in mean:
            mean[name] = scale * stdev(record[measured] for record in records)
    return mean
