"""Held-out rewards with intervals that are valid even at 0 of 8 (Wilson for a rate, Newcombe for a change).

Trajectories of one instance are correlated. So the sample size used is the size of an independent sample with
the same standard error (Kish), but at most the number of trajectories. If all rewards are equal, it is the
number of instances.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.diagnosis.seeds import over_seeds
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Z95, Interval, wilson

PRIMARY = "val/reward"  # equals the reward of the primary set


@dataclass(slots=True, frozen=True, kw_only=True)
class HeldOut:
    """One held-out set.

    steps: steps of the first and the last reading.
    first, last: rewards at these steps.
    change: last minus first; None if there is only one reading.
    """

    name: str
    steps: tuple[int, int]
    first: Interval
    last: Interval
    change: Interval | None


def splits(*runs: RunData) -> list[str]:
    """Return the held-out sets except the one that val/reward reports."""
    names = _all_splits(*runs)
    rewards = {name: [run.series(f"val/{name}/reward") for run in runs] for name in names}
    return sorted(name for name in names if rewards[name] != [run.series(PRIMARY) for run in runs])


def primary_split(run: RunData) -> str:
    """Return the name of the held-out set that val/reward reports; "" if it is the only set, or unnamed."""
    others = splits(run)
    primary = sorted(_all_splits(run).difference(others))
    return primary[0] if others and primary else ""


def _all_splits(*runs: RunData) -> set[str]:
    return {n.split("/")[1] for r in runs for n in r.names() if n.startswith("val/") and n.count("/") == 2}


def held_out_sets(run: RunData) -> list[HeldOut]:
    """Return every held-out set with a reward, the primary set first and only once."""
    names = sorted(n for n in run.names() if n.startswith("val/") and n.endswith("/reward") and n != PRIMARY)
    primary = run.series(PRIMARY)
    metrics = {"held-out": PRIMARY} if primary[0] else {}
    metrics |= {n.split("/")[1].replace("_", " "): n for n in names if run.series(n) != primary}
    return [_read_set(run, label, metric) for label, metric in metrics.items()]


def _read_set(run: RunData, label: str, metric: str) -> HeldOut:
    steps, _ = run.series(metric)
    intervals = reward_intervals(run, metric)
    change = intervals[-1] - intervals[0] if len(steps) > 1 else None
    ends = (steps[0], steps[-1])
    return HeldOut(name=label, steps=ends, first=intervals[0], last=intervals[-1], change=change)


def reward_intervals(run: RunData, metric: str) -> list[Interval]:
    """Return the 95% interval of every reading: Wilson's for rewards in 0..1, else the normal interval.

    For the mean of several seeds, the interval is over seeds, unless all seeds have equal readings.
    """
    if run.seeds:
        return _over_seeds(run, metric)
    errors = dict(zip(*run.series(f"{metric}_se"), strict=True))
    records = {record.get("training/global_step"): record for record in reversed(run.records)}
    return [
        _interval(reward, errors.get(step, 0.0), _counts(records.get(step, {}), metric))
        for step, reward in zip(*run.series(metric), strict=True)
    ]


def _over_seeds(run: RunData, metric: str) -> list[Interval]:
    """Return for each step the interval of a held-out metric over seeds."""
    by_seed = [dict(zip(*seed.series(metric), strict=True)) for seed in run.seeds]
    intervals = []
    for step, _ in zip(*run.series(metric), strict=True):
        values = [readings[step] for readings in by_seed]
        if len(set(values)) > 1:
            intervals.append(over_seeds(values))
            continue

        # 0 of 8 in every seed does not prove 0, so if all seeds agree, the instances are the sample.
        records = [r for seed in run.seeds for r in seed.records if r.get("training/global_step") == step]
        counts = [_counts(record, metric) for record in records]
        intervals.append(_interval(values[0], 0.0, (sum(c[0] for c in counts), sum(c[1] for c in counts))))
    return intervals


def _interval(reward: float, error: float, counts: tuple[float, float]) -> Interval:
    """Return the interval of a reward. counts: its instances and trajectories; 0 if not recorded."""
    if not 0 <= reward <= 1:
        return Interval(reward, reward - Z95 * error, reward + Z95 * error)

    # Attempts at one instance are correlated; the error determines the size of an equivalent independent
    # sample.
    max_size = max(counts)
    size = reward * (1 - reward) / error**2 if error > 0 else counts[0] or max_size
    size = min(size, max_size) if max_size else size
    return wilson(reward, size) if size > 0 else Interval(reward, 0.0, 1.0)


def _counts(record: dict[str, object], metric: str) -> tuple[float, float]:
    """Return the numbers of instances and trajectories in a mean; for val/reward, in the primary set."""
    sets = [metric]
    if metric == PRIMARY:
        sets = [
            name
            for name, value in record.items()
            if name.startswith("val/")
            and name.count("/") == 2
            and name.endswith("/reward")
            and value == record.get(PRIMARY)
        ]

    def largest(count: str) -> float:
        recorded = (record.get(f"{name.removesuffix('reward')}{count}") for name in sets)
        return max((float(x) for x in recorded if isinstance(x, (int, float))), default=0.0)

    return largest("instances"), largest("trajectories")
