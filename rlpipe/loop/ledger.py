"""The state of every prompt and every trajectory, in SQLite in the run directory.

    prompt      admitted -> generating -> complete -> trained(step) | dropped(reason)
                   ^------------'  `reopen`: rolled out again after a resume
    trajectory             generating -> complete -> trained(step, version) | dropped(reason)
                                      `-> masked

Owns `ledger.sqlite`. Only the controller writes it. A checkpoint has a copy of the ledger (`save`), and a
resumed run continues from that copy (`restore`). `violations` checks the invariants: an admitted prompt ends
exactly once, and a trajectory is trained in exactly one step. If the disk is full or a lock is never
released, the run continues: the ledger is then in memory and in the next checkpoint. A damaged file is only
renamed, because a start restores the copy in the newest complete checkpoint. To print the ledger of a run:

    rlpipe ledger RUN
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlpipe.loop.ledger_file import DAMAGED, check_format, copied, opened, result_code, set_aside
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

_UNWRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY)
_UNFINISHED = "('admitted', 'generating', 'complete')"
# What a row would mean -> a query that must not return any row.
_NEVER = {
    "a prompt between others was never admitted": """
        SELECT idx FROM prompts WHERE idx > 0 AND idx - 1 NOT IN (SELECT idx FROM prompts)""",
    "a trained prompt has no trained trajectory": """
        SELECT group_id FROM prompts p WHERE state = 'trained' AND NOT EXISTS
        (SELECT 1 FROM trajectories t WHERE t.group_id = p.group_id AND t.state = 'trained')""",
    "a trajectory was trained in another step than its prompt": """
        SELECT trajectory_id FROM trajectories t JOIN prompts p USING (group_id)
        WHERE t.state = 'trained' AND (p.state != 'trained' OR p.step != t.step)""",
    "a trajectory outlived its prompt": """
        SELECT trajectory_id FROM trajectories t JOIN prompts p USING (group_id)
        WHERE p.state IN ('trained', 'dropped') AND t.state IN ('generating', 'complete')""",
    "a trajectory finished before its prompt": """
        SELECT trajectory_id FROM trajectories t JOIN prompts p USING (group_id)
        WHERE p.state IN ('admitted', 'generating') AND t.state NOT IN ('generating', 'dropped')""",
    "a trajectory was trained on tokens newer than the trainer": """
        SELECT trajectory_id FROM trajectories WHERE state = 'trained' AND oldest_version > version""",
    "a trajectory belongs to no prompt": """
        SELECT trajectory_id FROM trajectories WHERE group_id NOT IN (SELECT group_id FROM prompts)""",
}


def ignore_event(kind: str, **fields: object) -> None:
    """Ignore an event; the default if there is no event log."""


class Ledger:
    """The ledger of a run; only the controller writes it. event: called for incidents (kind, fields).

    Raises ValueError for a file of another format, or one that cannot be opened. A change that the current
    state does not allow raises AssertionError, and then the file does not change.
    """

    def __init__(self, path: Path, event: Callable[..., None] = ignore_event) -> None:
        self._path, self._event = path, event
        try:
            self._db = opened(path)
        except sqlite3.DatabaseError as error:
            if result_code(error) not in DAMAGED:
                raise ValueError(
                    f"the ledger {path} cannot be opened ({error}): make room on its disk, end the process "
                    "that holds it, or choose another run.dir."
                ) from error

            # A damaged ledger is replaced by an empty one; resuming restores the copy of a checkpoint.
            aside = set_aside(path)
            event("ledger_damaged", error=str(error), aside=aside.name)
            self._db = opened(path)

        check_format(self._db, path)

    def admitted(self, index: int, prompt: Prompt, version: int) -> None:
        """Record that a prompt may be rolled out from now on."""
        row = (index, prompt.group_id, prompt.instance_id, version)
        self._change(
            lambda db: db.execute("INSERT INTO prompts VALUES (?,?,?,'admitted',?,0,NULL,NULL)", row)
        )

    def generating(self, prompt: Prompt, trajectory_ids: Sequence[str]) -> None:
        """Record that a rollout worker received a prompt, to roll it out as these trajectories."""
        rows = [(name, prompt.group_id) for name in trajectory_ids]

        def change(db: sqlite3.Connection) -> None:
            _move(db, prompt.group_id, before=("admitted",), after="generating")
            db.execute("UPDATE prompts SET attempts = attempts + 1 WHERE group_id = ?", (prompt.group_id,))
            db.executemany(
                "INSERT INTO trajectories (trajectory_id, group_id, state) VALUES (?,?,'generating')", rows
            )

        self._change(change)

    def reopen(self, group_id: str) -> None:
        """Return an interrupted prompt to the state `admitted`, to be rolled out again."""

        def change(db: sqlite3.Connection) -> None:
            _move(db, group_id, before=("generating",), after="admitted")
            db.execute("DELETE FROM trajectories WHERE group_id = ?", (group_id,))

        self._change(change)

    def completed(self, group: Group) -> None:
        """Record that all trajectories of a prompt are finished (some of them may be masked)."""
        name = group.prompt.group_id

        def change(db: sqlite3.Connection) -> None:
            _move(db, name, before=("generating",), after="complete")
            for t in group.trajectories:
                moved = db.execute(
                    "UPDATE trajectories SET state = ?, reward = ?, oldest_version = ?, tokens = ?, info = ? "
                    "WHERE trajectory_id = ? AND group_id = ? AND state = 'generating'",
                    (
                        "masked" if t.status is TrajectoryStatus.MASKED else "complete",
                        t.reward,
                        t.oldest_version,
                        t.response_length,
                        json.dumps(_metadata(t)),
                        t.trajectory_id,
                        name,
                    ),
                ).rowcount
                assert moved == 1, f"trajectory {t.trajectory_id} was not being generated"

            # A worker must return every trajectory that it received.
            (left,) = db.execute(
                "SELECT COUNT(*) FROM trajectories WHERE group_id = ? AND state = 'generating'", (name,)
            ).fetchone()
            assert not left, f"prompt {name} came without {left} of its trajectories"

        self._change(change)

    def dropped(self, group_id: str, reason: str) -> None:
        """Record that a prompt in flight, in any state, ends untrained."""
        self._change(lambda db: _drop_prompt(db, group_id, reason))

    def all_dropped(self, groups: Sequence[Group], reason: str) -> None:
        """Record, in one transaction, that the prompts of these groups end untrained."""
        self._change(lambda db: [_drop_prompt(db, group.prompt.group_id, reason) for group in groups])

    def trajectories_dropped(self, trajectories: Sequence[Trajectory], reason: str) -> None:
        """Record that complete trajectories end untrained; their siblings continue."""

        def change(db: sqlite3.Connection) -> None:
            for t in trajectories:
                moved = _drop_trajectories(
                    db, "trajectory_id = ? AND state = 'complete'", (t.trajectory_id,), reason=reason
                )
                assert moved == 1, f"trajectory {t.trajectory_id} is not 'complete', cannot become 'dropped'"

        self._change(change)

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """Record that groups were part of step `step` (1-based); a group without a reward is dropped."""

        def change(db: sqlite3.Connection) -> None:
            for group in groups:
                name = group.prompt.group_id

                useful = [t for t in group.trajectories if t.status is TrajectoryStatus.COMPLETE]
                if not useful:
                    _move(
                        db,
                        name,
                        before=("complete",),
                        after="dropped",
                        step=step,
                        reason="every trajectory masked",
                    )
                    continue

                # The step used the weights of the previous version.
                _move(db, name, before=("complete",), after="trained", step=step)
                for t in useful:
                    moved = db.execute(
                        "UPDATE trajectories SET state = 'trained', step = ?, version = ? "
                        "WHERE trajectory_id = ? AND state = 'complete'",
                        (step, step - 1, t.trajectory_id),
                    ).rowcount
                    assert moved == 1, f"trajectory {t.trajectory_id} is not 'complete', cannot be trained"

        self._change(change)

    def drop_unfinished(self, reason: str) -> int:
        """Drop every prompt in flight; return how many there were."""

        def change(db: sqlite3.Connection) -> int:
            unfinished = f"SELECT group_id FROM prompts WHERE state IN {_UNFINISHED}"
            _drop_trajectories(db, f"group_id IN ({unfinished})", (), reason=reason)
            return db.execute(
                f"UPDATE prompts SET state = 'dropped', reason = ? WHERE state IN {_UNFINISHED}", (reason,)
            ).rowcount

        return self._change(change)

    def unfinished(self) -> list[tuple[int, str, str, str]]:
        """Return (index, group_id, instance_id, state) of every prompt in flight, by index."""
        return self._db.execute(
            f"SELECT idx, group_id, instance_id, state FROM prompts WHERE state IN {_UNFINISHED} ORDER BY idx"
        ).fetchall()

    def ended_from(self, index: int) -> list[int]:
        """Return the indices of prompts from `index` on that have ended."""
        rows = self._db.execute(
            f"SELECT idx FROM prompts WHERE idx >= ? AND state NOT IN {_UNFINISHED}", (index,)
        )
        return [ended for (ended,) in rows]

    def admitted_count(self) -> int:
        """Return the number of prompts admitted so far, which is the position in the prompt stream."""
        return self._db.execute("SELECT COUNT(*) FROM prompts").fetchone()[0]

    def oldest_admission(self) -> int | None:
        """Return the version at which the oldest prompt in flight was admitted; None if there is none."""
        return self._db.execute(
            f"SELECT MIN(admitted_version) FROM prompts WHERE state IN {_UNFINISHED}"
        ).fetchone()[0]

    def counts(self) -> dict[str, int]:
        """Count the prompts by state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())

    def violations(self, *, ended: bool = False, epoch: int | None = None) -> list[str]:
        """Return the rows that break an invariant; see the function `violations`."""
        return violations(self._db, ended=ended, epoch=epoch)

    def save(self, path: Path) -> None:
        """Write a copy of the current state. Raises sqlite3.OperationalError when the disk is full."""
        with contextlib.closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)
            # The copy must be a single file without a write-ahead log.
            copy.execute("PRAGMA journal_mode=DELETE")

    def restore(self, path: Path) -> None:
        """Replace the content by a copy that `save` wrote; later changes are lost."""
        with contextlib.closing(sqlite3.connect(path)) as copy:
            check_format(copy, path)
            try:
                copied(copy, self._db)
            except sqlite3.OperationalError as error:
                # The file cannot be written: continue in memory.
                self._db.close()
                self._db = sqlite3.connect(":memory:", check_same_thread=False)
                copy.backup(self._db)
                self._event("ledger_in_memory", error=str(error))

    def clear(self) -> None:
        """Delete all rows, for a run that starts from its first step."""
        self._change(lambda db: [db.execute(f"DELETE FROM {table}") for table in ("trajectories", "prompts")])

    def close(self) -> None:
        """Flush and close. A ledger in memory is written back if the disk has space again."""
        if self._in_memory:
            with (
                # If the disk is still full, an event has already reported it.
                contextlib.suppress(sqlite3.OperationalError),
                contextlib.closing(sqlite3.connect(self._path)) as file,
            ):
                copied(self._db, file)

        self._db.close()

    @property
    def _in_memory(self) -> bool:
        return not self._db.execute("PRAGMA database_list").fetchone()[2]

    def _change(self, change: Callable[[sqlite3.Connection], Any]) -> Any:
        """Apply `change` as one transaction; continue in memory when the file cannot be written."""
        try:
            with self._db:
                return change(self._db)
        except sqlite3.OperationalError as error:
            if result_code(error) not in _UNWRITABLE or self._in_memory:
                raise

            full, self._db = self._db, sqlite3.connect(":memory:", check_same_thread=False)
            full.backup(self._db)
            full.close()
            self._event("ledger_in_memory", error=str(error))

        # The failed transaction was rolled back: repeat it in memory.
        with self._db:
            return change(self._db)


def violations(db: sqlite3.Connection, *, ended: bool = False, epoch: int | None = None) -> list[str]:
    """Return the violated invariants, one sentence each; empty when all hold.

    ended: whether the run is over; then no prompt may be in flight. epoch: number of training instances; each
    must be admitted once before any is admitted again.
    """
    never = dict(_NEVER)
    if ended:
        never["a prompt did not end"] = f"SELECT group_id FROM prompts WHERE state IN {_UNFINISHED}"
    if epoch:
        never["an instance was admitted twice in one epoch"] = (
            f"SELECT instance_id FROM prompts GROUP BY idx / {int(epoch)}, instance_id HAVING COUNT(*) > 1"
        )
    return [f"{what}: {examples}" for what, query in never.items() if (examples := _some(db, query))]


def _some(db: sqlite3.Connection, query: str, shown: int = 5) -> str:
    names = [str(name) for (name, *_) in db.execute(query)]
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _move(
    db: sqlite3.Connection,
    group_id: str,
    *,
    before: Sequence[str],
    after: str,
    step: int | None = None,
    reason: str | None = None,
) -> None:
    moved = db.execute(
        f"UPDATE prompts SET state = ?, step = ?, reason = ? WHERE group_id = ? "
        f"AND state IN ({','.join('?' * len(before))})",
        (after, step, reason, group_id, *before),
    ).rowcount
    assert moved == 1, f"prompt {group_id} is not {' or '.join(map(repr, before))}, cannot become {after!r}"


def _drop_prompt(db: sqlite3.Connection, group_id: str, reason: str) -> None:
    _move(db, group_id, before=("admitted", "generating", "complete"), after="dropped", reason=reason)
    _drop_trajectories(db, "group_id = ?", (group_id,), reason=reason)


def _drop_trajectories(db: sqlite3.Connection, which: str, values: Sequence[Any], *, reason: str) -> int:
    return db.execute(
        f"UPDATE trajectories SET state = 'dropped', reason = ? "
        f"WHERE {which} AND state IN ('generating', 'complete')",
        (reason, *values),
    ).rowcount


def _metadata(trajectory: Trajectory) -> dict[str, Any]:
    """Return the scalar metadata of the environment; lists and objects are only in the trajectory files."""
    return {k: v for k, v in trajectory.info.items() if isinstance(v, str | int | float | bool)}


def _lines(db: sqlite3.Connection) -> Iterator[str]:
    """Yield the lines that the command prints."""
    for table in ("prompts", "trajectories"):
        yield f"{table}:"
        for state, count in db.execute(f"SELECT state, COUNT(*) FROM {table} GROUP BY state ORDER BY 2 DESC"):
            yield f"  {state:<12}{count}"

    for reason, count in db.execute(
        "SELECT reason, COUNT(*) FROM prompts WHERE reason NOTNULL GROUP BY reason"
    ):
        yield f"dropped, {reason}: {count} prompts"

    (again,) = db.execute("SELECT COUNT(*) FROM prompts WHERE attempts > 1").fetchone()
    yield f"run more than once (resumed runs): {again} prompts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ledger of a run and check its invariants; return 1 if one is violated."""
    parser = argparse.ArgumentParser(
        prog="rlpipe ledger", description="Show the ledger of a run and check its invariants."
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--running", action="store_true", help="prompts may be in flight")
    options = parser.parse_args(arguments)

    path = options.run / "ledger.sqlite"
    if not path.is_file():
        parser.error(f"{path} does not exist: name the directory of a run.")

    # Read-only: a running job may write the file at the same time.
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        check_format(db, path)
        print("\n".join(_lines(db)))
        wrong = violations(db, ended=not options.running)

    print("\n".join(f"VIOLATED: {what}" for what in wrong) or "every invariant holds")
    return 1 if wrong else 0
