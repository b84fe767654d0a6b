"""Reads a run directory for reports and analysis: series, events, settings and trajectories.

Tolerates the files of a crashed run (no steps, a truncated line, no config), because a report is needed most
after a crash. Flow: files -> `RunData` -> figures and tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpipe.config.renamed import with_current_names
from rlpipe.metrics.bus import STEP
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.names import Level

Points = tuple[list[int], list[float]]


@dataclass(slots=True, kw_only=True)
class RunData:
    """The content of one run directory.

    path, name: path and name of the directory. records: one per step, in order. events: in order of time.
    settings: config.yaml, parsed ({} if that fails); config_text: its text. trajectories: the recorded ones.
    broken_lines: number of lines of the JSONL files that could not be read.
    seeds: the averaged runs, if this is a mean of several runs; else [].
    """

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    broken_lines: int = 0
    seeds: list[RunData] = field(default_factory=list)

    def series(self, name: str) -> Points:
        """Return the steps at which a metric was observed and finite, and its values there."""
        seen = [(r[STEP], r[name]) for r in self.records if isinstance(r.get(name), (int, float))]
        return [step for step, _ in seen], [float(value) for _, value in seen]

    def names(self) -> list[str]:
        """Return the sorted names of the metrics observed at least once."""
        return sorted({name for record in self.records for name in record} - {STEP, "time"})

    def coarse(self, window: int) -> RunData:
        """Return the run with every `window` steps merged into one record, for plots of long runs.

        Each metric becomes the mean of its values in the window (the extreme, if its name ends in /max or
        /min), recorded at the window's last step; step 0 is not merged.
        """
        groups: dict[int, list[dict[str, Any]]] = {}
        for record in self.records:
            groups.setdefault(ceil(record[STEP] / window), []).append(record)
        return replace(self, records=[_merged(group) for group in groups.values()])

    @property
    def steps(self) -> int:
        """Number of training steps done."""
        return max((r[STEP] for r in self.records), default=0)

    @property
    def planned_steps(self) -> int | None:
        """Number of training steps that the settings request; None when the settings cannot be read."""
        run = self.settings.get("run")
        steps = run.get("steps") if isinstance(run, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def outcome(self) -> str:
        """How the run ended: done, stopped, interrupted or failed; "no end" if killed or still running."""
        last = [e for e in self.events if e.get("kind") in ("start", "end")][-1:]
        return str(last[0].get("outcome", "done")) if last and last[0]["kind"] == "end" else "no end"

    @property
    def seconds(self) -> float:
        """Seconds that the processes of the run took, each from its start to its last record or event."""
        starts = [e["time"] for e in self.events if e.get("kind") == "start" and "time" in e]
        times = sorted(x["time"] for x in (*self.records, *self.events) if "time" in x)

        # The time between the last record of one process and the start of the next does not count.
        total, begin, previous = 0.0, None, None
        for now in times:
            if begin is None or now in starts:
                total += previous - begin if begin is not None else 0.0
                begin = now
            previous = now

        return total + (previous - begin if begin is not None else 0.0)

    def count(self, level: Level) -> int:
        """Count the events of a level."""
        return sum(e.get("level") == level for e in self.events)


def load_run(path: str | Path) -> RunData:
    """Read a run directory, complete or not.

    Raises ValueError when `path` is not a run directory.
    """
    path = Path(path)
    known = ("metrics.jsonl", "events.jsonl", "config.yaml")
    if not any((path / name).is_file() for name in known):
        raise ValueError(
            f"{str(path)!r} is not a run directory: it has none of {', '.join(known)}. Name the directory "
            "that run.dir of a run was set to."
        )

    records, broken_records = read_jsonl(path / "metrics.jsonl")
    events, broken_events = read_jsonl(path / "events.jsonl")
    trajectories, broken_trajectories = read_jsonl(path / "trajectories.jsonl")
    text = (path / "config.yaml").read_text() if (path / "config.yaml").is_file() else ""

    return RunData(
        path=path,
        name=path.resolve().name,
        records=_one_per_step(records),
        events=events,
        settings=_parse(text),
        config_text=text,
        trajectories=trajectories,
        broken_lines=broken_records + broken_events + broken_trajectories,
    )


def _one_per_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge records of the same step (from late validation or a resumed run); later values win."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if isinstance(record.get(STEP), (int, float)):
            by_step.setdefault(int(record[STEP]), {}).update(record)

    return [by_step[step] for step in sorted(by_step)]


def _merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge records of several steps into one: metrics named max or min keep the extreme, others the mean."""
    merged: dict[str, Any] = dict(records[-1])

    for name in {name for record in records for name in record} - {STEP, "time"}:
        values = [r[name] for r in records if isinstance(r.get(name), (int, float))]
        if values:
            # The mean of several maxima would not be a maximum.
            pick = {"max": max, "min": min}.get(name.rsplit("/", 1)[-1], fmean)
            merged[name] = pick(values)

    return merged


def _parse(text: str) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # the report still shows the text
    return with_current_names(settings) if isinstance(settings, dict) else {}


def flat_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name.

    >>> flat_settings({"trainer": {"lr": 0.1}, "recipe": "swe_rl"})
    {'trainer.lr': 0.1, 'recipe': 'swe_rl'}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = isinstance(value, dict)
        flat |= flat_settings(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def dump(data: object) -> str:
    """Return the data as JSON that is safe inside a <script> element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
