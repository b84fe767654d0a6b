"""The elements that all plots share: the figure, its sections, and lines in the colours of the page.

Owns no metric. Colours are written "$0".."$6" ("$0a" for a faint colour, "$text" for the text colour); the
page and the PNGs replace them by the colours of their theme.
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
# Axis of horizontal bars, with names from top to bottom. The type is set because a run may be named "0".
NAMES_AXIS = {"type": "category", "autorange": "reversed", "automargin": True}
SECTIONS = ("Training", ACCEPTANCE, WHY, SPEED)


@dataclass(slots=True, kw_only=True)
class Figure:
    """One plot.

    note: caption that tells the reader what to look for.
    wide: whether the plot takes the full width of the page.
    section: heading under which the plot appears, one of `SECTIONS`.
    """

    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    section: str = "Training"


def smooth(values: Sequence[float], half_life: float = 4.0) -> list[float]:
    """Return the bias-corrected exponential moving average. half_life: steps."""
    decay, total, weight, averages = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        # Dividing by the sum of the weights removes the bias of the first values towards 0.
        total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight)
    return averages


def line(points: tuple[list[int], list[float]], name: str, colour: int, **more: Any) -> dict[str, Any]:
    """Return a line as a plotly trace. points: x and y values. more: further fields of the trace."""
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
    """Return a series of bars as a plotly trace. across: horizontal bars. more: further trace fields."""
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
    """Return traces of a metric with 95% intervals from its standard errors, `metric`_se; [] without data."""
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
