"""The declarations of catalogue.toml: every metric and event, with kind, unit and definition.

Reads the catalogue and looks up names; computes and stores no metrics. Flow: `MetricsBus.emit` looks up
`declared(name)` and refuses an undeclared name, the report shows the definitions, and running this module
prints docs/metrics.md. Metrics that also exist in verl have verl's names (marked `*` on the page), so that
existing dashboards work.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from rlpipe.metrics.distributions import SKETCH_PARTS, Histogram, Sketch
from rlpipe.metrics.values import Last, Max, Mean, Min, Ratio, Spans, Sum, Value


class Kind(StrEnum):
    """Reduction of a metric over actors and micro-batches. It determines which value types are allowed."""

    AVERAGE = "average"  # Mean or Ratio: Σ / Σ
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    HISTOGRAM = "histogram"  # counts between fixed bounds
    SKETCH = "sketch"  # quantiles; a record holds one number for each of SKETCH_PARTS
    SPANS = "spans"  # intervals of time; they go to the trace and never enter a record
    ANY = "any"  # a family of names with different kinds

    def accepts(self, value: Value) -> bool:
        """Return whether a value of this type may be emitted under a name of this kind."""
        return isinstance(value, _TYPES[self])


_TYPES: dict[Kind, tuple[type, ...]] = {
    Kind.AVERAGE: (Mean, Ratio),
    Kind.SUM: (Sum,),
    Kind.MAX: (Max,),
    Kind.MIN: (Min,),
    Kind.LAST: (Last,),
    Kind.HISTOGRAM: (Histogram,),
    Kind.SKETCH: (Sketch,),
    Kind.SPANS: (Spans,),
    Kind.ANY: (Mean, Ratio, Sum, Max, Min, Last),
}


STATS = {"mean": Kind.AVERAGE, "max": Kind.MAX, "min": Kind.MIN}  # metrics of a row of kind "stats"


@dataclass(slots=True, kw_only=True, frozen=True)
class Metric:
    """Declaration of one metric, or of a family of metrics.

    name: may contain `{placeholders}`. unit: "1" for a fraction or a pure number. definition: one sentence.
    source: verl, an equation, or rlpipe. produced_by: component that emits it.
    """

    name: str
    kind: Kind
    unit: str
    definition: str
    source: str
    produced_by: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Section:
    """Declarations under one heading of the reference page."""

    title: str
    metrics: tuple[Metric, ...]


class Level(StrEnum):
    """Importance of an event to a reader."""

    INFO = "info"
    WARNING = "warning"
    FAULT = "fault"


def _read(table: Mapping[str, Any]) -> tuple[tuple[Section, ...], dict[str, tuple[Level, str]]]:
    """Return the sections and events of the catalogue."""
    sections = []
    for title, section in table["sections"].items():
        shared = {"source": section["source"], "produced_by": section["produced_by"]}

        # A row of kind "stats" declares three metrics.
        rows = [
            Metric(name=name, kind=Kind(reduction), unit=unit, definition=definition, **shared)
            for row, kind, unit, definition in section["metrics"]
            for name, reduction in (
                [(f"{row}/{part}", reduction) for part, reduction in STATS.items()]
                if kind == "stats"
                else [(row, kind)]
            )
        ]
        sections.append(Section(title=title, metrics=tuple(rows)))

    return tuple(sections), {kind: (Level(level), text) for kind, (level, text) in table["events"].items()}


# Events are often emitted while something fails. An unknown kind is therefore recorded, never refused; its
# level is info unless the caller passes another.
_TABLE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))
SECTIONS, EVENTS = _read(_TABLE)
_extensions: list[Metric] = []


def metrics() -> Iterator[Metric]:
    """Yield all declarations in page order; declarations of extensions come last."""
    for section in SECTIONS:
        yield from section.metrics
    yield from _extensions


def declare(metric: Metric) -> None:
    """Declare a metric of an extension (a user's environment, reward or policy loss) before emitting it.

    Raises ValueError when the name is taken by a different declaration.
    """
    taken = [known for known in metrics() if known.name == metric.name]
    if taken and taken[0] != metric:
        raise ValueError(f"metric {metric.name!r} is already declared as {taken[0]}. Choose another name.")

    if not taken:
        _extensions.append(metric)
        declared.cache_clear()
        _index.cache_clear()


@cache
def declared(name: str) -> Metric:
    """Return the declaration of a name: the exact name if there is one, else the first pattern that matches.

    Raises ValueError when the name is not declared.

    >>> declared("spec/acceptance_rate/depth_2").kind
    <Kind.AVERAGE: 'average'>
    """
    exact, patterns = _index()
    if name in exact:
        return exact[name]

    for pattern, metric in patterns:
        if pattern.fullmatch(name):
            return metric

    raise ValueError(
        f"metric {name!r} is not declared. Declare it once, with unit and definition, in "
        "rlpipe/metrics/catalogue.toml (`declare` in an extension), or correct its spelling."
    )


@cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    """Return the metrics without placeholders by name, and the others with the pattern of their names."""
    exact: dict[str, Metric] = {}
    patterns: list[tuple[re.Pattern[str], Metric]] = []
    for metric in metrics():
        if "{" in metric.name:
            # {k} stands for a number, every other placeholder for one segment of the name.
            literal = re.escape(metric.name).replace(r"\{", "{").replace(r"\}", "}")
            regex = re.sub(r"\{(\w+)\}", lambda m: r"\d+" if m[1] == "k" else r"[\w.\-]+", literal)
            patterns.append((re.compile(regex), metric))
        else:
            exact[metric.name] = metric
            if metric.kind is Kind.SKETCH:
                exact |= {f"{metric.name}/{part}": metric for part in SKETCH_PARTS}

    return exact, patterns


def reference_page() -> str:
    """Return the text of docs/metrics.md: every declaration, in one table per section."""
    lines = [_TABLE["page"]["opening"].rstrip()]

    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", f"Produced by: {section.metrics[0].produced_by}. "]
        lines[-1] += f"Source: {section.metrics[0].source}."
        lines += ["", "| name | kind | unit | definition |", "|---|---|---|---|"]

        for m in section.metrics:
            star = "\\*" if m.source == "verl" else ""
            lines.append(f"| `{m.name}`{star} | {m.kind} | {m.unit} | {m.definition} |")

    lines += ["", "## Events", "", _TABLE["page"]["events"]]
    lines += ["", "| kind | level | meaning |", "|---|---|---|"]
    lines += [f"| `{kind}` | {level} | {meaning} |" for kind, (level, meaning) in EVENTS.items()]

    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_page(), end="")
