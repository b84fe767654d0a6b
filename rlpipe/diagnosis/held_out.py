"""Held-out rewards with intervals that hold at 0 of 8 too: Wilson's for a rate, Newcombe's for a change.

Trajectories of one instance are alike, so the size that enters is that of an independent sample with the same
standard error (Kish), never more than was played, and the number of instances where all rewards are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Z95, Interval, wilson


@dataclass(slots=True, frozen=True, kw_only=True)
class HeldOut:
    """One held-out set: its first and last reward, and the change between them (None for one reading)."""

    name: str
    steps: tuple[int, int]
    first: Interval
    last: Interval
    change: Interval | None


def held_out_sets(run: RunData) -> list[HeldOut]:
    """Every held-out set with a reward, the primary one first; sets that repeat it are left out."""
    names = sorted(
        {n for n in run.names() if n.startswith("val/") and n.endswith("/reward") and n != "val/reward"}
    )
    primary = run.series("val/reward")
    chosen = [("held-out", "val/reward")] if primary[0] else []
    chosen += [(n.split("/")[1].replace("_", " "), n) for n in names if run.series(n) != primary]
    return [_one(run, label, name) for label, name in chosen]


def _one(run: RunData, label: str, name: str) -> HeldOut:
    steps, rewards = run.series(name)
    first, last = (
        interval_at(run, name, step, reward)
        for step, reward in ((steps[0], rewards[0]), (steps[-1], rewards[-1]))
    )
    change = None
    if len(steps) > 1:
        change = last - first
    return HeldOut(name=label, steps=(steps[0], steps[-1]), first=first, last=last, change=change)


def interval_at(run: RunData, name: str, step: int, reward: float) -> Interval:
    """The interval of one reading: Wilson's where the reward is a rate, else of its standard error."""
    error = dict(zip(*run.series(f"{name}_se"), strict=True)).get(step, 0.0)
    if not 0 <= reward <= 1:
        return Interval(reward, reward - Z95 * error, reward + Z95 * error)
    counts = [_count(run, name, step, what) for what in ("instances", "trajectories")]
    most = max(counts)
    size = reward * (1 - reward) / error**2 if error > 0 else counts[0] or most
    size = min(size, most) if most else size
    return wilson(reward, size) if size > 0 else Interval(reward, 0.0, 1.0)


def _count(run: RunData, name: str, step: int, what: str) -> float:
    """How many entered the mean; of val/reward, those of the set whose reward it repeats. 0: not recorded."""
    record = next((r for r in run.records if r.get("training/global_step") == step), {})
    sets = (
        [name]
        if name != "val/reward"
        else [
            n
            for n in record
            if n.startswith("val/")
            and n.count("/") == 2
            and n.endswith("/reward")
            and record[n] == record.get(name)
        ]
    )
    return max((float(record.get(f"{n.removesuffix('reward')}{what}") or 0) for n in sets), default=0.0)
