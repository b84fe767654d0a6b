"""Writes and reads the two JSONL files of a run directory: metrics.jsonl and events.jsonl.

Owns the file format, one JSON object per line. A line is appended with one write, so readers of a
running run see complete lines. If a crash or a full disk cuts a line, it gets a line end before the next line
is appended, and readers skip and count it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

STEP = "training/global_step"
# Required types of the fields of a line, by file name. A field may be missing.
SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "metrics.jsonl": {STEP: int, "time": (int, float)},
    "events.jsonl": {"kind": str, "level": str, "time": (int, float)},
    "trajectories.jsonl": {"step": int, "turns": list, "info": dict},
}


class _JsonLines:
    """An append-only file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._broken = False  # the last line has no line end

    def open(self) -> None:
        """Open for appending; an existing file is continued."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self._broken = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def append(self, item: dict[str, Any]) -> None:
        """Append one line with one write. Raises OSError when it could not be written in full."""
        assert self._file is not None, "append before open"
        line = json.dumps(item, allow_nan=False, default=str) + "\n"
        data = (b"\n" if self._broken else b"") + line.encode()
        self._broken = True
        written = os.write(self._file, data)
        if written < len(data):
            message = f"wrote {written} of {len(data)} bytes. Is the disk full?"
            raise OSError(errno.ENOSPC, message, str(self._path))
        self._broken = False

    def close(self) -> None:
        """Write everything to the disk and close."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None


class MetricsFile(_JsonLines):
    """A sink that writes records to metrics.jsonl."""

    name = "metrics.jsonl"

    def record(self, record: dict[str, Any]) -> None:
        self.append(record)


class EventsFile(_JsonLines):
    """A sink that writes events to events.jsonl."""

    name = "events.jsonl"

    def event(self, event: dict[str, Any]) -> None:
        self.append(event)


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the objects of a file, and count the lines that are malformed; ([], 0) without a file.

    Fields of the files of a run directory must have the types of SHAPES. Numbers that are not finite are read
    as None. Lone surrogates cannot be written as UTF-8, so they are read as question marks.
    """
    if not path.is_file():
        return [], 0

    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    parsed = [_object(line, SHAPES.get(path.name, {})) for line in lines]
    items = [item for item in parsed if item is not None]
    return items, len(lines) - len(items)


def _object(line: str, shape: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any] | None:
    """Return a line as an object; None if it is not an object of this shape."""
    try:
        item = json.loads(line, parse_float=_finite, parse_int=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(item, dict) or any(
        key in item and not isinstance(item[key], kind) for key, kind in shape.items()
    ):
        return None

    # Lone surrogates cannot be written again as UTF-8.
    if "\\ud" in line.lower():
        return json.loads(json.dumps(item, ensure_ascii=False).encode(errors="replace"))
    return item


def _finite(text: str) -> float | int | None:
    number = float(text)
    if not isfinite(number):
        return None
    return int(text) if text.lstrip("-").isdigit() else number


def truncate_records(run_dir: Path, step: int) -> list[str]:
    """Remove the records after `step` (0: all records), because a run resumed at `step` writes them again.

    The files are truncated in place: this needs no disk space, and works while the files are open.
    Returns the malformed lines that remain, as FILE:NUMBER; readers skip them.
    """
    malformed = []
    for name, key in (("metrics.jsonl", STEP), ("trajectories.jsonl", "step")):
        file = run_dir / name
        size = 0
        for number, line in enumerate(_lines(file), 1):
            item = _object(line.decode(errors="replace"), SHAPES[name])
            item_step = None if item is None else item.get(key)
            known = item_step is not None

            # A line without a line end was cut by a crash, so it is the last line.
            if not step or (item_step > step if known else not line.endswith(b"\n")):
                os.truncate(file, size)
                break

            size += len(line)
            if not known and line.strip():
                malformed.append(f"{name}:{number}")
    return malformed


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True) if file.is_file() else []
