"""trace.json.gz of a run directory: spans in the JSON trace format that Perfetto opens.

Owns the file. In the trace an actor is a process, a lane is a thread, and a span is a complete event
("ph": "X", microseconds since 1970 as integers). Every batch is a separate gzip member, appended with one
write, so that a killed run leaves a readable file. `close` adds the closing bracket, and a resumed run
removes it before it appends. Open the file on https://ui.perfetto.dev or with `trace_processor`.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe.metrics.values import Span

logger = logging.getLogger(__name__)

NAME = "trace.json.gz"
BATCH = 2000  # events in a gzip member
MAX_SPANS = 2_000_000  # spans in a file, about 30 MB
ORDER = ("controller", "trainer", "rollout")  # order of actors in the trace, from top to bottom


def _member(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), default=str)


_FIRST = {"ph": "M", "pid": 10_000, "tid": 0, "name": "process_name", "args": {"name": "controller"}}
_OPEN, _CLOSE = _member("[" + _line(_FIRST)), _member("\n]\n")


class TraceFile:
    """A sink that writes spans to trace.json.gz."""

    name = NAME

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[dict[str, Any]] = []
        self._lanes: dict[tuple[str, int], tuple[int, int]] = {}
        self._actors: dict[str, int] = {}
        self._written = 0

    def open(self) -> None:
        """Continue the file of an interrupted run; a new file is created with its first spans."""
        data = self._path.read_bytes() if self._path.exists() else b""

        # Remove the closing bracket of the list, so that further spans can be appended.
        if data.endswith(_CLOSE):
            with self._path.open("r+b") as file:
                file.truncate(len(data) - len(_CLOSE))

    def spans(self, spans: Sequence[Span]) -> None:
        """Append spans; beyond MAX_SPANS they are dropped, with one warning."""
        for actor, lane, what, begin, end, details in spans:
            if self._written == MAX_SPANS:
                logger.warning("%s is full (%d spans): later spans are not traced", NAME, MAX_SPANS)
            self._written += 1
            if self._written > MAX_SPANS:
                return

            pid, tid = self._process_and_thread(actor, lane)
            start = round(begin * 1e6)
            event = {"ph": "X", "pid": pid, "tid": tid, "name": what, "ts": start}
            event["dur"] = round(end * 1e6) - start
            self._pending.append(event | ({"args": details} if details else {}))
        if len(self._pending) >= BATCH:
            self._flush()

    def close(self) -> None:
        """Write the pending spans and the closing bracket; without spans, write no file."""
        self._flush()
        if self._path.exists():
            with self._path.open("ab") as file:
                file.write(_CLOSE)

    def _process_and_thread(self, actor: str, lane: int) -> tuple[int, int]:
        """Return the process and thread ids of a lane, and name both when it is first seen."""
        if (actor, lane) not in self._lanes:
            if actor not in self._actors:
                pid = self._actors[actor] = _pid(actor)
                self._name(pid, 0, "process_name", name=actor)
                self._name(pid, 0, "process_sort_index", sort_index=pid)
            pid = self._actors[actor]
            self._lanes[actor, lane] = pid, lane + 1
            self._name(pid, lane + 1, "thread_name", name=f"{actor}, lane {lane}")
            self._name(pid, lane + 1, "thread_sort_index", sort_index=lane)
        return self._lanes[actor, lane]

    def _name(self, pid: int, tid: int, what: str, **arguments: object) -> None:
        self._pending.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments})

    def _flush(self) -> None:
        if self._pending:
            data = _member("".join(",\n" + _line(event) for event in self._pending))
            self._pending = []
            with self._path.open("ab", buffering=0) as file:
                file.write(data if file.tell() else _OPEN + data)


def _pid(actor: str) -> int:
    """Return the process id of an actor: 10,000 * (number of its kind) + its index; the same after a restart.

    >>> _pid("controller"), _pid("trainer 0"), _pid("rollout 12")
    (10000, 20000, 30012)
    """
    kind, _, number = actor.partition(" ")
    group = ORDER.index(kind) + 1 if kind in ORDER else len(ORDER) + 1
    return 10_000 * group + (int(number) if number.isdigit() else 0)
