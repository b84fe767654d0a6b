"""The plots of the report as PNG files, for slides and papers: the same figures, drawn by matplotlib.

Draws the figure dicts (lines, markers, stacked areas, horizontal bars, error bars, two panels on one x axis)
in the light theme; figures.py owns their content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import Figure
from rlpipe.report.figures import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8a9099")
DASHES = {"dot": ":", "dash": "--", "dashdot": "-.", "longdash": (0, (8, 3))}
DPI = 144
TEXT = "#1c1f23"


def write_pngs(runs: Sequence[RunData], directory: Path) -> list[Path]:
    """Write one file per plot of the report, named after the plot: `acceptance-acceptance-by-depth.png`.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError('--png needs matplotlib: pip install -e ".[dashboards]".') from error

    directory.mkdir(parents=True, exist_ok=True)
    written = []

    for figure in figures(runs):
        name = re.sub(r"\W+", "-", f"{figure.section} {figure.title}".lower()).strip("-")
        _draw(figure, directory / f"{name}.png")
        written.append(directory / f"{name}.png")

    return written


def _draw(figure: Figure, path: Path) -> None:
    """Draw a figure of the report with matplotlib, and save it."""
    from matplotlib.figure import Figure as Canvas

    height = figure.layout.get("height", 290) / 80
    canvas = Canvas(figsize=(9.5 if figure.wide else 6.5, height + 0.7), dpi=DPI, layout="constrained")

    upper = any(trace.get("yaxis") == "y2" for trace in figure.traces)
    if upper:
        top, bottom = canvas.subplots(2, 1, sharex=True)
        panels = {"y": bottom, "y2": top}
        _style(top, figure.layout, "yaxis2")
    else:
        bottom = canvas.subplots()
        panels = {"y": bottom}

    _style(bottom, figure.layout, "yaxis")
    bottom.set_xlabel(figure.layout.get("xaxis", {}).get("title", {}).get("text", "training step"))

    bars = [trace for trace in figure.traces if trace["type"] == "bar"]
    if bars:
        _bars(bottom, bars, figure.layout)

    # Draw stacked areas in one call, because each begins at the top of the previous one.
    stacked = [trace for trace in figure.traces if trace.get("stackgroup")]
    if stacked:
        colours = [_colour(trace["fillcolor"]) for trace in stacked]
        labels = [trace["name"] for trace in stacked]
        bottom.stackplot(stacked[0]["x"], [t["y"] for t in stacked], labels=labels, colors=colours, lw=0)

    # The remaining traces are lines or dots.
    for trace in figure.traces:
        if trace not in bars and trace not in stacked:
            _line(panels[trace.get("yaxis", "y")], trace)

    for panel in panels.values():
        _limits(panel, figure.layout, "yaxis2" if panel is panels.get("y2") else "yaxis")
        if len(figure.traces) > 1 and panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=7.5, frameon=False, ncols=2 if len(figure.traces) > 4 else 1)

    canvas.suptitle(figure.title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=TEXT)
    canvas.savefig(path)


def _line(panel: Axes, trace: dict[str, Any]) -> None:
    """Draw a trace of the report: a line, points, or both, with error bars."""
    style = trace.get("line", {})
    marker = trace.get("marker", {})
    points = "markers" in trace["mode"]

    options = {
        "color": _colour(marker.get("color", style.get("color", "$0"))),
        "lw": style.get("width", 2) * 0.8 if "lines" in trace["mode"] else 0,
        "ls": DASHES.get(style.get("dash"), "-"),
        "marker": "o" if points else None,
        "ms": marker.get("size", 6) * 0.6,
        "alpha": marker.get("opacity", 1.0) if points else 1.0,
        "label": trace["name"] if trace.get("showlegend", True) else None,
    }

    if "error_y" in trace:
        panel.errorbar(trace["x"], trace["y"], yerr=_ends(trace["error_y"]), capsize=2.5, **options)
    else:
        panel.plot(trace["x"], trace["y"], **options)


def _bars(panel: Axes, bars: Sequence[dict[str, Any]], layout: dict[str, Any]) -> None:
    """Draw series of bars: vertical or horizontal, grouped or stacked."""
    across, stack = bars[0].get("orientation") == "h", layout.get("barmode") == "stack"

    # Horizontal bars swap the axes, and with them the names of matplotlib's arguments.
    labels, values, error = ("y", "x", "error_x") if across else ("x", "y", "error_y")
    draw, base = (panel.barh, "left") if across else (panel.bar, "bottom")

    ticks = list(dict.fromkeys(label for trace in bars for label in trace[labels]))
    ends = [0.0] * len(ticks)
    thick = 0.7 if stack else 0.8 / len(bars)

    for n, trace in enumerate(bars):
        shift = 0 if stack else (n - (len(bars) - 1) / 2) * thick
        draw(
            [ticks.index(label) + shift for label in trace[labels]],
            trace[values],
            thick,
            **{base: ends if stack else 0, error[-1] + "err": _ends(trace.get(error, {}))},
            color=_colour(trace["marker"]["color"]),
            error_kw={"lw": 0.9, "capsize": 2} if across else {},
            label=trace["name"],
        )
        if stack:
            ends = [a + b for a, b in zip(ends, trace[values], strict=True)]

    set_ticks = panel.set_yticks if across else panel.set_xticks
    set_ticks(range(len(ticks)), [str(tick) for tick in ticks])
    if across:
        panel.axvline(0, color=TEXT, lw=0.6)
        panel.invert_yaxis()


def _ends(error: dict[str, Any]) -> Any:
    """Return the lengths of error bars for matplotlib: [n], or [below, above] if they are asymmetric."""
    return [error["arrayminus"], error["array"]] if "arrayminus" in error else error.get("array")


def _style(panel: Axes, layout: dict[str, Any], axis: str) -> None:
    panel.grid(color="#e3e3df", lw=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, colors="#62686f")
    panel.set_ylabel(layout.get(axis, {}).get("title", {}).get("text", ""), fontsize=9)


def _limits(panel: Axes, layout: dict[str, Any], axis: str) -> None:
    if layout.get(axis, {}).get("rangemode") == "tozero":
        low, high = panel.get_ylim()
        panel.set_ylim(min(0.0, low) if low < -0.05 * abs(high) else 0.0, max(0.0, high))


def _colour(name: str) -> str:
    """Return the colour of the page's theme for "$3", "$3a" (faint) or "$text"."""
    if not name.startswith("$"):
        return name
    if name == "$text":
        return TEXT

    faint = name.endswith("a")
    return PALETTE[int(name[1:].removesuffix("a")) % len(PALETTE)] + ("55" if faint else "")
