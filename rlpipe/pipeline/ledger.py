"""The life of every prompt, in SQLite beside the run: admitted -> complete -> trained | dropped.

Owns `ledger.sqlite`. Invariant: an admitted prompt ends at most once, as trained(step) or
dropped(reason), and what is neither is in flight.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from rlpipe.types import Group, Prompt, TrajectoryStatus

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    idx INTEGER PRIMARY KEY, group_id TEXT UNIQUE NOT NULL, instance_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('admitted', 'complete', 'trained', 'dropped')),
    admitted_version INTEGER NOT NULL, step INTEGER, reason TEXT);
CREATE TABLE IF NOT EXISTS trajectories (
    trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES prompts (group_id),
    status TEXT NOT NULL, reward REAL, oldest_version INTEGER, tokens INTEGER NOT NULL,
    step INTEGER, info TEXT NOT NULL);
"""


class Ledger:
    """Written by the controller only."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_SCHEMA)

    def admitted(self, index: int, prompt: Prompt, version: int) -> None:
        """A prompt was handed to a rollout worker."""
        with self._db:
            self._db.execute(
                "INSERT INTO prompts VALUES (?, ?, ?, 'admitted', ?, NULL, NULL)",
                (index, prompt.group_id, prompt.instance_id, version),
            )

    def completed(self, group: Group) -> None:
        """All trajectories of a prompt are finished (some may be masked)."""
        rows = [
            (
                t.trajectory_id,
                t.group_id,
                str(t.status),
                t.reward,
                t.oldest_version,
                t.response_length,
                None,
                json.dumps({k: v for k, v in t.info.items() if isinstance(v, str | int | float | bool)}),
            )
            for t in group.trajectories
        ]
        with self._db:
            self._move(group.prompt.group_id, "admitted", "complete")
            self._db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def trained(self, groups: list[Group], step: int) -> None:
        """Groups were part of optimizer step `step` (1-based); one without a reward ends dropped."""
        with self._db:
            for group in groups:
                name = group.prompt.group_id
                if all(t.status is TrajectoryStatus.MASKED for t in group.trajectories):
                    self._move(name, "complete", "dropped", step=step, reason="every trajectory masked")
                    continue
                self._move(name, "complete", "trained", step=step)
                self._db.execute(
                    "UPDATE trajectories SET step = ? WHERE group_id = ? AND status = 'complete'",
                    (step, name),
                )

    def drop_unfinished(self, reason: str) -> int:
        """End whatever is still in flight; returns how many prompts that were."""
        with self._db:
            return self._db.execute(
                "UPDATE prompts SET state = 'dropped', reason = ? WHERE state IN ('admitted', 'complete')",
                (reason,),
            ).rowcount

    def rewind(self, first_index: int) -> None:
        """Forget prompts from `first_index` on: a resumed run admits them again."""
        with self._db:
            self._db.execute(
                "DELETE FROM trajectories WHERE group_id IN (SELECT group_id FROM prompts WHERE idx >= ?)",
                (first_index,),
            )
            self._db.execute("DELETE FROM prompts WHERE idx >= ?", (first_index,))

    def counts(self) -> dict[str, int]:
        """Prompts by state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())

    def close(self) -> None:
        """Flush and close."""
        self._db.close()

    def _move(
        self, group_id: str, before: str, after: str, step: int | None = None, reason: str | None = None
    ) -> None:
        moved = self._db.execute(
            "UPDATE prompts SET state = ?, step = ?, reason = ? WHERE group_id = ? AND state = ?",
            (after, step, reason, group_id, before),
        ).rowcount
        assert moved == 1, f"prompt {group_id} is not '{before}', cannot become '{after}'"
