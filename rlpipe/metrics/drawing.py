"""What all plots are made of: the figure, its sections, and lines in the palette of the page.

Owns no metric. Colours are written "$0".."$6" ("$0a" for a faint one, "$text" for the text's): the page and
the PNGs replace them by the palette of their theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COLOURS = 7
ACCEPTANCE, WHY, SPEED = "Acceptance", "Why acceptance moved", "Speed"
SECTIONS = ("Training", ACCEPTANCE, WHY, SPEED)


@dataclass(slots=True, kw_only=True)
class Figure:
    """One plot. note: what to look for. wide: takes the whole width of the page. section: its heading."""

    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    section: str = "Training"


def smooth(values: Sequence[float], half_life: float = 4.0) -> list[float]:
    """Exponential moving average, started without bias; half_life in steps."""
    keep, total, weight, out = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def line(points: tuple[list[int], list[float]], name: str, colour: int, **more: Any) -> dict[str, Any]:
    line = {"color": f"${colour % COLOURS}", "width": 2} | more.pop("line", {})
    y = [short(v) for v in points[1]]
    return {"type": "scatter", "mode": "lines", "name": name, "x": points[0], "y": y, "line": line, **more}


def short(value: float) -> float:
    return float(f"{value:.5g}")
