"""Spans of an actor's work, and the share of time that is spent on each kind of work.

Owns measuring; `trace` writes the file. One `SpanLog` per actor (a rollout worker, a trainer rank, the
controller); concurrent work of one actor is in separate lanes, so the spans of a lane never overlap. Flow:

    with log.lane() as lane:  with lane.span("generate", turn=0): ...
    log.drain() -> {"trace/...": Spans, "perf/utilisation/...": Ratio}  with the actor's other metrics

A span enters the trace when it ends; utilisation counts it while it is open, so every step has a value even
if no span ends in it. Times are seconds since 1970; each process reads the wall clock once and adds monotonic
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from threading import Lock

from rlpipe.metrics.values import Ratio, Span, Spans, Value

_ORIGIN = time.time() - time.perf_counter()
MAX_BUFFERED = 200_000  # spans between two drains; further spans are dropped


def now() -> float:
    """Return the seconds since 1970; never decreases."""
    return _ORIGIN + time.perf_counter()


class SpanLog:
    """Spans of one actor; thread-safe.

    actor: its name in the trace, such as "rollout 0"; the first word groups its metrics.
    busy: kind of span -> metric that reports the share of time in which at least one such span was open.
    """

    def __init__(self, actor: str, busy: Mapping[str, str] | None = None) -> None:
        self._actor = actor
        self._name = f"trace/{actor.split()[0]}"
        self._metrics = dict(busy or {})
        self._lock = Lock()
        self._spans: list[Span] = []
        self._free: list[int] = []
        self._lanes = 0
        self._open = dict.fromkeys(self._metrics, 0)
        self._since = dict.fromkeys(self._metrics, 0.0)
        self._seconds = dict.fromkeys(self._metrics, 0.0)
        self._drained = now()

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """Reserve the lowest free lane for the duration of the block."""
        with self._lock:
            if self._free:
                number = heappop(self._free)
            else:
                number, self._lanes = self._lanes, self._lanes + 1
        try:
            yield Lane(self, number)
        finally:
            with self._lock:
                heappush(self._free, number)

    def drain(self) -> dict[str, Value]:
        """Return the spans that ended since the last drain, and the busy shares of the time since then."""
        with self._lock:
            at = now()
            values: dict[str, Value] = {self._name: Spans(self._spans)}
            self._spans = []

            # A span that is still open counts up to now; its remaining time counts in the next drain.
            for what, metric in self._metrics.items():
                if self._open[what]:
                    self._seconds[what] += at - self._since[what]
                    self._since[what] = at
                values[metric] = Ratio(self._seconds[what], at - self._drained)
                self._seconds[what] = 0.0
            self._drained = at
        return values

    def _begin(self, what: str) -> float:
        """Begin a span; return the time of its start."""
        with self._lock:
            at = now()
            if what in self._open:
                self._open[what] += 1
                # Overlapping spans count once: from the beginning of the first to the end of the last.
                if self._open[what] == 1:
                    self._since[what] = at
            return at

    def _end(self, lane: int, what: str, *, begin: float, details: dict[str, object]) -> None:
        """End a span: add its time to the shares, and record it for the timeline."""
        with self._lock:
            at = now()
            if what in self._open:
                self._open[what] -= 1
                if not self._open[what]:
                    self._seconds[what] += at - self._since[what]
            if len(self._spans) < MAX_BUFFERED:
                self._spans.append((self._actor, lane, what, begin, at, details))


class Lane:
    """One row of an actor in the trace. work: kind of the span that is open, "" without one."""

    __slots__ = ("_log", "_number", "work")

    def __init__(self, log: SpanLog, number: int) -> None:
        self._log, self._number, self.work = log, number, ""

    @contextmanager
    def span(self, what: str, **details: object) -> Iterator[None]:
        """Record the block as one span; Perfetto shows its details when the span is selected."""
        begin, before = self._log._begin(what), self.work
        self.work = what
        try:
            yield
        finally:
            self.work = before
            self._log._end(self._number, what, begin=begin, details=details)
