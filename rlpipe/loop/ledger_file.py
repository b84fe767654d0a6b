"""The file of a ledger: its tables, how it is opened, and how a damaged one is replaced."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

_FORMAT = 2
_LOCK_S = 30.0  # how long another process may lock the file (a backup, a shell)
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_SCHEMA = """
CREATE TABLE prompts (
    idx INTEGER PRIMARY KEY, group_id TEXT UNIQUE NOT NULL, instance_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('admitted', 'generating', 'complete', 'trained', 'dropped')),
    admitted_version INTEGER NOT NULL, attempts INTEGER NOT NULL, step INTEGER, reason TEXT,
    CHECK (state != 'trained' OR step IS NOT NULL), CHECK ((state = 'dropped') = (reason IS NOT NULL)));
CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES prompts (group_id),
    state TEXT NOT NULL CHECK (state IN ('generating', 'complete', 'masked', 'trained', 'dropped')),
    reward REAL, oldest_version INTEGER, tokens INTEGER, info TEXT,
    step INTEGER, version INTEGER, reason TEXT,
    CHECK ((state = 'trained') = (step IS NOT NULL)), CHECK ((state = 'dropped') = (reason IS NOT NULL)));
CREATE INDEX of_group ON trajectories (group_id);
CREATE INDEX unfinished ON prompts (state) WHERE state IN ('admitted', 'generating', 'complete');
"""


def opened(path: Path) -> sqlite3.Connection:
    """Open a ledger, and create its tables if it is new. Raises sqlite3.DatabaseError for any damage."""
    # Only one thread uses it at a time, but not always the one that opened it (a notebook's event loop).
    db = sqlite3.connect(path, timeout=_LOCK_S, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        # This is safe enough, because the copy in a checkpoint is flushed to the disk separately.
        db.execute("PRAGMA synchronous=NORMAL")

        if not _table_names(db):
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_FORMAT}; COMMIT")

        # Report damage now, not in the middle of the run.
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            damage = sqlite3.DatabaseError(verdict)
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage
    except BaseException:
        db.close()
        raise

    return db


def set_aside(path: Path) -> Path:
    """Rename a damaged ledger and SQLite's log files next to it; return the new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")

    for end in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(aside.with_name(aside.name + end))

    return aside


def copied(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy a full ledger. Raises sqlite3.OperationalError when the disk is full or a lock stays held."""
    deadline = time.monotonic() + _LOCK_S

    # Without this limit SQLite would retry the copy for ever.
    def progress(status: int, *_: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline:
            raise sqlite3.OperationalError("database is locked")

    source.backup(target, progress=progress)


def result_code(error: sqlite3.DatabaseError) -> int:
    """Return the primary result code, without the details that SQLite adds to it."""
    return error.sqlite_errorcode & 0xFF


def _table_names(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def check_format(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a ledger of another format version. Raises ValueError."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version != _FORMAT:
        raise ValueError(
            f"{path} is a ledger of format {version}, this version writes {_FORMAT}: continue that run with "
            "the version that began it, or choose another run.dir."
        )
