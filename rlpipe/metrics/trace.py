"""trace.json.gz of a run directory: spans in the JSON trace format that Perfetto opens, written and read.

Owns the file. An actor is a process of the trace, a lane one of its threads, a span a complete event
("ph": "X", microseconds since 1970 as integers). Every batch is a gzip member of its own, appended with one
write, so that a killed run leaves a readable file; the closing bracket comes with `close` and is taken off
again when a resumed run appends. Open it on https://ui.perfetto.dev or with `trace_processor`.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlpipe.metrics.values import Span

logger = logging.getLogger(__name__)

NAME = "trace.json.gz"
BATCH = 2000  # events in a gzip member
MAX_SPANS = 2_000_000  # in a file: about 30 MB
ORDER = ("controller", "trainer", "rollout")  # of actors, from top to bottom


def _member(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), default=str)


_FIRST = {"ph": "M", "pid": 10_000, "tid": 0, "name": "process_name", "args": {"name": "controller"}}
_OPEN, _CLOSE = _member("[" + _line(_FIRST)), _member("\n]\n")


class TraceFile:
    """Sink of trace.json.gz: spans, no records and no events."""

    name = NAME

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[dict[str, Any]] = []
        self._lanes: dict[tuple[str, int], tuple[int, int]] = {}
        self._actors: dict[str, int] = {}
        self._written = 0

    def open(self) -> None:
        """Continue the file of an interrupted run; a new one begins with its first spans."""
        data = self._path.read_bytes() if self._path.exists() else b""
        if data.endswith(_CLOSE):
            with self._path.open("r+b") as file:
                file.truncate(len(data) - len(_CLOSE))

    def spans(self, spans: Sequence[Span]) -> None:
        """Append spans; beyond MAX_SPANS they are dropped, with one warning."""
        for actor, lane, what, begin, end, facts in spans:
            if self._written == MAX_SPANS:
                logger.warning("%s is full (%d spans): the rest of the run is not traced", NAME, MAX_SPANS)
            self._written += 1
            if self._written > MAX_SPANS:
                return
            pid, tid = self._place(actor, lane)
            start = round(begin * 1e6)
            event = {"ph": "X", "pid": pid, "tid": tid, "name": what, "ts": start}
            event["dur"] = round(end * 1e6) - start
            self._pending.append(event | ({"args": facts} if facts else {}))
        if len(self._pending) >= BATCH:
            self._flush()

    def record(self, record: dict[str, Any]) -> None:
        """Records have their own file."""

    def event(self, event: dict[str, Any]) -> None:
        """Events have their own file."""

    def close(self) -> None:
        """Write what is left and end the list; nothing without spans."""
        self._flush()
        if self._path.exists():
            with self._path.open("ab") as file:
                file.write(_CLOSE)

    def _place(self, actor: str, lane: int) -> tuple[int, int]:
        """Process and thread of a lane; named when first seen."""
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

    def _name(self, pid: int, tid: int, what: str, **facts: object) -> None:
        self._pending.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": facts})

    def _flush(self) -> None:
        if self._pending:
            data = _member("".join(",\n" + _line(event) for event in self._pending))
            self._pending = []
            with self._path.open("ab", buffering=0) as file:
                file.write(data if file.tell() else _OPEN + data)


def _pid(actor: str) -> int:
    """The same for an actor in every part of a resumed run: 10,000s by kind, then its number.

    >>> _pid("controller"), _pid("trainer 0"), _pid("rollout 12")
    (10000, 20000, 30012)
    """
    kind, _, number = actor.partition(" ")
    group = ORDER.index(kind) + 1 if kind in ORDER else len(ORDER) + 1
    return 10_000 * group + (int(number) if number.isdigit() else 0)


def read_trace(path: Path) -> list[Span]:
    """The spans of a file, whole or cut by a crash, in order of their begin.

    Raises ValueError when it is not such a file.
    """
    import zlib

    data, texts = path.read_bytes(), []
    while data:
        unzip = zlib.decompressobj(wbits=31)
        try:
            texts.append(unzip.decompress(data))
        except zlib.error as error:
            raise ValueError(f"{path} is not a trace of a run ({error}). Name a {NAME}.") from error
        if not unzip.eof:  # cut here
            texts[-1] = texts[-1][: texts[-1].rfind(b",\n")]
        data = unzip.unused_data
    text = b"".join(texts).decode().rstrip()
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    return sorted(
        (
            (
                names[e["pid"]],
                e["tid"] - 1,
                e["name"],
                e["ts"] / 1e6,
                (e["ts"] + e["dur"]) / 1e6,
                e.get("args", {}),
            )
            for e in events
            if e.get("ph") == "X"
        ),
        key=lambda span: span[3],
    )


def busy_seconds(spans: Iterable[Span], begin: float, end: float) -> dict[tuple[str, str], float]:
    """Seconds within [begin, end] in which an actor did a thing, by (actor, what); overlaps count once."""
    intervals: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for actor, _, what, start, stop, _ in spans:
        if stop > begin and start < end:
            intervals[actor, what].append((max(start, begin), min(stop, end)))
    return {key: _union(parts) for key, parts in intervals.items()}


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
