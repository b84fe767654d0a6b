"""The metrics bus: components emit values, the controller commits steps, sinks receive records.

Owns the reduction of values per step and the delivery to sinks. It decides nothing about a run, and a
failing sink never affects the run.

    component --emit(step, values)--> open step --commit(step)--> record --> queue -> thread -> sink
                      |___ Spans among the values ----------------> spans --> queue -> thread -> trace
    anyone    --event(kind, ...)---------------------------------> event --> queue -> thread -> sink

emit, commit and event never wait for a sink. Each sink has a thread and a bounded queue. When the queue is
full, records are dropped (one `sink_slow` event). After `MAX_ERRORS` failures in a row the sink is disabled
until the run ends (one `sink_disabled` event, which the other sinks still record). A full disk does not
disable a sink, because it may have space again later: sinks keep trying, after one `disk_full` warning.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from rlpipe.metrics.distributions import Sketch
from rlpipe.metrics.jsonl import STEP, EventsFile
from rlpipe.metrics.names import EVENTS, Level, declared
from rlpipe.metrics.values import Span, Spans, Value, reduce

logger = logging.getLogger(__name__)

QUEUE_SIZE = 4096  # records and events that may wait for a sink
MAX_ERRORS = 3
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

Record = dict[str, Any]


class Sink(Protocol):
    """A destination of metrics. All methods run on the sink's own thread and may block or raise.

    A sink may have any of these methods, and receives only what they take:
        record(Record): one committed step: STEP, time (unix seconds) and metrics. A metric is a float, None
            if it is not finite, {"edges": ..., "counts": ...} if it is a histogram.
        event(Record): one event: time, kind, level and fields.
        spans(list[Span]): the spans of one emission.
    """

    name: str

    def open(self) -> None:
        """Acquire files, processes, the terminal."""

    def close(self) -> None:
        """Flush and release."""


class MetricsBus:
    """Collects metrics and delivers them to sinks. Thread-safe; usable as a context manager.

    sinks: receive records and events.
    events: a JSONL file to which events are also appended.

    Invariant: a value emitted for a step appears in exactly one record of that step. A step may be
    committed again (late validation): its second record holds only values emitted after the first record.
    """

    def __init__(
        self, sinks: Sequence[Sink], *, events: Path | None = None, queue_size: int = QUEUE_SIZE
    ) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, dict[str, Value]] = {}
        self._disk_was_full = False
        self._progress = time.monotonic()
        sinks = [*sinks, EventsFile(events)] if events else sinks
        self._workers = [_Worker(sink, queue_size, self) for sink in sinks]

        # Create all workers before the first one starts: a sink that fails at once reports to the others.
        for worker in self._workers:
            worker.start()

    def emit(self, step: int, values: Mapping[str, Value]) -> None:
        """Merge values into an open step, or open the step with them.

        Raises ValueError, and merges no value, when a name is not declared in metrics/catalogue.toml or a
        value's type does not fit the declared kind.
        """
        spans: list[Span] = []
        for name, value in values.items():
            kind = declared(name).kind
            if not kind.accepts(value):
                raise ValueError(
                    f"metric {name!r} is declared as {kind} but was emitted as {value!r}. Emit the type that "
                    "reduces this way (metrics/values.py), or correct the declaration in catalogue.toml."
                )
            if isinstance(value, Spans):
                spans += value.spans

        # Spans go to their sinks at once, the other values wait for the commit.
        values = {name: value for name, value in values.items() if not isinstance(value, Spans)}
        if values:
            with self._lock:
                known = self._open.setdefault(step, {})
                known.update(reduce(({name: known[name] for name in values if name in known}, values)))
        if spans:
            for worker in self._workers:
                worker.put("spans", spans)

    def peek(self, step: int) -> Record:
        """Return the values emitted so far for an open step, in the form of a record."""
        with self._lock:
            values = dict(self._open.get(step, {}))
        return {STEP: step, **dict(observed(values))}

    def commit(self, step: int) -> Record:
        """Close a step and send its record to every sink.

        Returns the record: STEP, time and every metric that was observed. A sketch becomes one number for
        each of its parts. A value that is not finite becomes None and emits a `nonfinite_metric` event.
        """
        self.progressed()
        with self._lock:
            values = self._open.pop(step, {})

        record: Record = {STEP: step, "time": round(time.time(), 3)}
        nonfinite = []
        for name, value in observed(values):
            finite = isinstance(value, dict) or isfinite(value)
            record[name] = value if finite else None
            if not finite:
                nonfinite.append(name)

        for worker in self._workers:
            worker.put("record", record)
        if nonfinite:
            self.event("nonfinite_metric", step=step, names=nonfinite)
        return record

    def event(self, kind: str, *, level: Level | None = None, **fields: object) -> None:
        """Record an event. `level` defaults to the declared level of the kind (info for an unknown kind)."""
        if kind != "waiting":
            self.progressed()
        if level is None:
            level = EVENTS[kind][0] if kind in EVENTS else Level.INFO
        fields = {k: str(v) if isinstance(v, float) and not isfinite(v) else v for k, v in fields.items()}
        event = {"time": round(time.time(), 3), "kind": kind, "level": str(level), **fields}
        for worker in self._workers:
            worker.put("event", event)

    def progressed(self) -> None:
        """Record progress of the run. Events and commits are recorded as progress automatically."""
        self._progress = time.monotonic()

    def quiet_seconds(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self._progress

    def take_back(self, timeout: float = 15.0) -> None:
        """Drop the values of open steps, and wait until every sink has received the committed records.

        Used when a run returns to a checkpoint; waits at most `timeout` seconds for all sinks.
        """
        with self._lock:
            self._open.clear()

        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def close(self, timeout: float = 15.0) -> None:
        """Commit the open steps and let the sinks finish, at most `timeout` seconds in all; idempotent."""
        for step in sorted(self._open):
            self.commit(step)
        deadline = time.monotonic() + timeout
        for worker in self._workers[:-1]:
            worker.finish()

        # The last worker writes the events file. It closes last: the other sinks may emit events until then.
        for worker in self._workers:
            worker.finish()
            is_last = worker is self._workers[-1]
            if not worker.join(max(1.0 if is_last else 0.0, deadline - time.monotonic())):
                logger.warning(
                    "metrics sink %s did not finish within %.0f s: its last records may be missing",
                    worker.sink.name,
                    timeout,
                )

    def disk_full(self, sink: str, error: Exception) -> None:
        """Report that the disk was full for a sink or another writer; only the first report is recorded."""
        with self._lock:
            first, self._disk_was_full = not self._disk_was_full, True
        if first:
            logger.warning("the disk is full: records for %s are lost until it has space: %s", sink, error)
            self.event("disk_full", sink=sink, error=str(error))

    def __enter__(self) -> MetricsBus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def observed(values: Mapping[str, Value]) -> Iterator[tuple[str, float | dict[str, list[float]]]]:
    """Yield the names and values of a record, sorted by name; metrics that were not observed are left out."""
    for name, metric in sorted(values.items()):
        value = metric.value()
        if isinstance(metric, Sketch):
            yield from ((f"{name}/{part}", x) for part, x in (value or {}).items() if x is not None)
        elif value is not None and name != STEP:
            yield name, value


def _no_space(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in NO_SPACE


_Item = tuple[str, Record | list[Span] | threading.Event]  # (method of the sink or "wait", its argument)


class _Worker:
    """One sink, its queue and its thread. The thread is a daemon: a hung sink cannot delay the exit."""

    def __init__(self, sink: Sink, queue_size: int, bus: MetricsBus) -> None:
        self.sink = sink
        self._bus = bus
        self._takes = {what for what in ("record", "event", "spans") if hasattr(sink, what)}
        self._queue: queue.Queue[_Item] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._disabled = threading.Event()
        self._was_slow = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{sink.name}", daemon=True)

    def start(self) -> None:
        """Open the sink on its thread and begin to deliver."""
        self._thread.start()

    def put(self, what: str, item: Record | list[Span]) -> None:
        """Queue a record, an event or spans; never waits."""
        if self._disabled.is_set() or self._closing.is_set() or what not in self._takes:
            return
        try:
            self._queue.put_nowait((what, item))
        except queue.Full:
            if not self._was_slow:
                self._was_slow = True
                self._bus.event("sink_slow", sink=self.sink.name, queued=self._queue.maxsize)

    def wait(self, timeout: float) -> None:
        """Return once the sink has received everything queued now, or after `timeout` seconds."""
        reached = threading.Event()
        if self._disabled.is_set() or not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(("wait", reached), timeout=max(0.0, timeout))
            reached.wait(max(0.0, timeout))

    def finish(self) -> None:
        """Refuse further items; the thread ends once its queue is empty."""
        self._closing.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; return whether it ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Pass queued records to the sink until the queue ends; disable it after repeated errors."""
        try:
            self.sink.open()
        except Exception as error:
            self._disable(error)
            return

        errors = 0
        while (item := self._next()) is not None:
            what, payload = item
            if isinstance(payload, threading.Event):
                payload.set()
                continue
            try:
                getattr(self.sink, what)(payload)
                errors = 0
            except Exception as error:
                # A full disk may have space again later; other errors disable the sink after a few.
                if _no_space(error):
                    self._bus.disk_full(self.sink.name, error)
                    continue
                errors += 1
                if errors == MAX_ERRORS:
                    self._disable(error)
                    break

        try:
            self.sink.close()
        except Exception as error:
            if _no_space(error):
                self._bus.disk_full(self.sink.name, error)
            else:
                self._disable(error)

    def _next(self) -> _Item | None:
        """Wait for the next item and return it; None if the bus is closing and the queue is empty."""
        while True:
            try:
                return self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._closing.is_set():
                    return None

    def _disable(self, error: Exception) -> None:
        if self._disabled.is_set():
            return
        self._disabled.set()
        message = f"{type(error).__name__}: {error}"
        logger.warning("metrics sink %s is off for the rest of the run: %s", self.sink.name, message)
        self._bus.event("sink_disabled", sink=self.sink.name, error=message)
