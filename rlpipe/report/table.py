"""A table of run directories for a terminal: the run, its progress and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpipe.metrics.runs import RunData, load_run

_COLUMNS = ("run", "recipe", "state", "step", "reward", "held out", "acceptance", "settings")


def runs_table(directories: Sequence[Path], settings: Mapping[Path, str] | None = None) -> str:
    """Format one line per run directory. settings: text of the settings that differ, for the last column."""
    rows = [_row(path, (settings or {}).get(path, "")) for path in directories]
    table = [row[: None if settings else -1] for row in [_COLUMNS, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def run_directories(root: Path) -> list[Path]:
    """Return the run directories at or below `root`, ordered by the time of their newest record."""
    runs = [path.parent for path in root.rglob("config.yaml") if (path.parent / "events.jsonl").exists()]
    return sorted(runs, key=lambda path: (path / "events.jsonl").stat().st_mtime)


def _row(path: Path, settings: str) -> tuple[str, ...]:
    """Return the table cells of a run."""
    # A run of a sweep that has not started yet has no files.
    begun = (path / "config.yaml").exists()
    run = load_run(path) if begun else RunData(path=path, name=path.name)
    reward, held_out, acceptance = (
        _last(run, name) for name in ("critic/rewards/mean", "val/reward", "spec/acceptance_rate")
    )
    recipe, planned = str(run.settings.get("recipe") or ""), run.planned_steps
    step = f"{run.steps}/{planned}" if planned else str(run.steps)
    state = run.outcome if run.events else "not begun"
    return str(path), recipe, state, step, reward, held_out, acceptance, settings


def _last(run: RunData, name: str) -> str:
    _, values = run.series(name)
    return f"{values[-1]:.3f}" if values else "-"
