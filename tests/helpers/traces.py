"""trace.json.gz read back: spans, and how long an actor was busy."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rlpipe.metrics.trace import NAME
from rlpipe.metrics.values import Span


def read_trace(path: Path) -> list[Span]:
    """The spans of a file, whole or cut by a crash, in order of their begin.

    Raises ValueError when it is not such a file.
    """
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
