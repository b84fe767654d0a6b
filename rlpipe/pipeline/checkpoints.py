"""Checkpoint directories: `checkpoints/step_N/`, complete or absent, the newest few kept.

Owns naming, atomicity and pruning; the trainer writes the content. A directory gets its final name
only after everything in it was written, so a crash leaves at most a `.tmp` that is swept away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


class CheckpointStore:
    """Checkpoints of one run."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(
            int(p.name.removeprefix("step_")) for p in self._directory.glob("step_*") if not p.suffix
        )

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lives."""
        return self._directory / f"step_{step}"

    async def save(self, step: int, state: dict[str, Any], write: Callable[[Path], Awaitable[None]]) -> Path:
        """Let `write` fill a new directory, add `state.json`, then give it its name and prune."""
        final, partial = self.path(step), self._directory / f"step_{step}.tmp"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        await write(partial)
        (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old))
        return final

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest complete checkpoint and its state; leftovers of a crash are removed."""
        for leftover in self._directory.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        steps = self.steps()
        if not steps:
            return None
        path = self.path(steps[-1])
        return path, json.loads((path / "state.json").read_text())
