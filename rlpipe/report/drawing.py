"""The parts of all plots: the figure, its sections, and lines in the palette of the page.

Owns no metric. Colours are written "$0".."$6" ("$0a" for a faint one, "$text" for the text's): the page and
the PNGs replace them by the palette of their theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Z95

COLOURS = 7
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
ACCEPTANCE, WHY, SPEED = "Acceptance", "Why acceptance moved", "Speed"
# Of bars that lie: names from top to bottom. A run called "0" would make an axis of numbers otherwise.
NAMES_AXIS = {"type": "category", "autorange": "reversed", "automargin": True}
SECTIONS = ("Training", ACCEPTANCE, WHY, SPEED)


@dataclass(slots=True, kw_only=True)
class Figure:
    """One plot.

    note: what the reader should look for.
    wide: the plot takes the full width of the page.
    section: its heading, one of `SECTIONS`.
    """

    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    section: str = "Training"


def smooth(values: Sequence[float], half_life: float = 4.0) -> list[float]:
    """Return the exponential moving average, started without bias; half_life in steps."""
    decay, total, weight, averages = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        # Dividing by the sum of weights removes the bias towards 0 of the first values.
        total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight)
    return averages


def line(points: tuple[list[int], list[float]], name: str, colour: int, **more: Any) -> dict[str, Any]:
    """Return a line; points: x and y, more: fields of the trace."""
    style = {"color": f"${colour % COLOURS}", "width": 2} | more.pop("line", {})
    y = [short(v) for v in points[1]]
    return {"type": "scatter", "mode": "lines", "name": name, "x": points[0], "y": y, "line": style, **more}


def bars(
    name: str,
    colour: int,
    labels: Sequence[Any],
    *,
    values: Sequence[float],
    errors: Sequence[float] | None = None,
    across: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return one series of bars, upright or across, with errors; more: fields of the trace."""
    ends = [short(value) for value in values]
    x, y, axis = (ends, labels, "x") if across else (labels, ends, "y")
    trace = {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": f"${colour % COLOURS}"}, **more}
    if errors is not None:
        style = {"thickness": 1.2, "width": 3, "color": "$text"}
        trace[f"error_{axis}"] = {"type": "data", "array": [short(e) for e in errors], **style}
    return trace | ({"orientation": "h"} if across else {})


def line_with_errors(
    run: RunData, metric: str, name: str, *, colour: int, **more: Any
) -> list[dict[str, Any]]:
    """Return a metric with 95% intervals from its standard errors, `metric`_se; [] if it was not observed."""
    steps, values = run.series(metric)
    if not steps:
        return []

    by_step = dict(zip(*run.series(f"{metric}_se"), strict=True))
    errors = [short(Z95 * by_step.get(step, 0.0)) for step in steps]
    slot = f"${colour % COLOURS}"
    return [
        line(
            (steps, values),
            name,
            colour,
            mode="lines+markers",
            marker={"size": 8, "color": slot},
            error_y={"type": "data", "array": errors, "thickness": 1.5, "width": 4, "color": slot},
            **more,
        )
    ]


def short(value: float) -> float:
    """Round to five significant digits, which keeps the page small."""
    return float(f"{value:.5g}")
