"""Helpers of all answers: tables, goals, and values with their errors or intervals, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NEVER = "more than 200"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def goal(met: bool, text: str) -> str:
    """Format a goal and whether the result meets it; `page.py` omits goals that were met from other pages."""
    return f"Goal: {text}, {'**met**' if met else '**missed**'}."


def pm(pair: list[float], digits: int = 2) -> str:
    """Format a value and its standard error."""
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def with_interval(estimate: list[float] | dict[str, float]) -> str:
    """Format a difference and its 95% interval, from `[value, low, high]` or an object with these keys."""
    value, low, high = (
        estimate if isinstance(estimate, list) else (estimate[k] for k in ("value", "low", "high"))
    )
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def difference(row: Mapping[str, Any], other: str, unit: str) -> str:
    """Format a difference with its interval and the seeds that would decide it; a dash if absent."""
    estimate: list[float] | None = row.get(f"minus {other}")
    if estimate is None:
        return "–"
    text = with_interval(estimate)
    if estimate[1] <= 0 <= estimate[2]:
        text += f" ({row[f'seeds to decide, minus {other}'] or NEVER} {unit})"
    return text
