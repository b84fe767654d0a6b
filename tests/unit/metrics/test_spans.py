"""Spans: lanes never overlap, utilisation is exact at any moment, and the trace says the same."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.metrics import spans as spans_module
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.spans import SpanLog
from rlpipe.metrics.trace import TraceFile
from rlpipe.metrics.values import Spans, reduce
from tests.helpers.traces import busy_seconds, read_trace

pytestmark = pytest.mark.unit
BUSY = {"generate": "perf/utilisation/rollout", "env": "perf/utilisation/env"}


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1_700_000_000.0
        monkeypatch.setattr(spans_module, "now", lambda: self.at)


def play(log: SpanLog, clock: Clock, random_: random.Random, moves: int) -> list[dict]:
    """Open and close spans of up to four trajectories at random times; drain now and then."""
    drained, open_ = [], {}
    for _ in range(moves):
        clock.at += random_.choice((0.0, 0.001, 0.25, 1.5))
        slot = random_.randrange(5)
        if slot == 4:
            drained.append(log.drain())
        elif slot in open_:
            for manager in open_.pop(slot):
                manager.__exit__(None, None, None)
        else:
            lane = log.lane()
            span = lane.__enter__().span(random_.choice(("generate", "env", "sync")))
            span.__enter__()
            open_[slot] = (span, lane)
    for managers in open_.values():
        for manager in managers:
            manager.__exit__(None, None, None)
    return [*drained, log.drain()]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), moves=st.integers(1, 80))
def test_utilisation_is_the_share_of_time_that_the_spans_cover(seed: int, moves: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        begin = clock.at
        log = SpanLog("rollout 0", BUSY)
        parts = play(log, clock, random.Random(seed), moves)
        whole = reduce(parts)
    seen = whole["trace/rollout"].spans
    covered = busy_seconds(seen, begin, clock.at)
    for what, metric in BUSY.items():
        assert whole[metric].numerator == pytest.approx(covered.get(("rollout 0", what), 0.0), abs=1e-5)
        assert whole[metric].denominator == pytest.approx(clock.at - begin, abs=1e-5)
    by_lane: dict[int, list] = {}
    for _, lane, _, start, end, _ in sorted(seen, key=lambda span: (span[3], span[4])):
        if by_lane.get(lane):
            assert start >= by_lane[lane][-1]
        by_lane.setdefault(lane, []).append(end)
    assert all(lane < 4 for lane in by_lane)  # freed lanes are used again


def test_a_span_that_goes_on_counts_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    log = SpanLog("rollout 3", BUSY)
    with log.lane() as lane, lane.span("generate", turn=2):
        clock.at += 4
        first = log.drain()
        clock.at += 1
    clock.at += 3
    second = log.drain()
    assert first["perf/utilisation/rollout"].value() == 1.0 and first["trace/rollout"].spans == []
    assert second["perf/utilisation/rollout"].value() == pytest.approx(0.25)
    ((actor, number, what, begin, end, facts),) = second["trace/rollout"].spans
    assert (actor, number, what, facts) == ("rollout 3", 0, "generate", {"turn": 2})
    assert end - begin == pytest.approx(5)


def test_a_failed_block_ends_its_span_and_frees_its_lane() -> None:
    log = SpanLog("rollout 0", BUSY)
    with pytest.raises(RuntimeError), log.lane() as lane, lane.span("env"):
        raise RuntimeError("boom")
    with log.lane() as lane, lane.span("env"):
        pass
    assert [(lane, what) for _, lane, what, *_ in log.drain()["trace/rollout"].spans] == [(0, "env")] * 2


SPANS = [
    ("rollout 1", 0, "generate", 1_700_000_000.25, 1_700_000_002.5, {"turn": 0}),
    ("rollout 1", 1, "env", 1_700_000_001.0, 1_700_000_003.0, {}),
    ("controller", 0, "wait", 1_700_000_000.0, 1_700_000_001.0, {}),
]


def write(path: Path, spans: list, close: bool = True) -> None:
    file = TraceFile(path)
    file.open()
    file.spans(spans)
    if close:
        file.close()
    else:
        file._flush()


def test_the_trace_is_the_json_array_format_with_named_processes_and_threads(tmp_path: Path) -> None:
    write(tmp_path / "trace.json.gz", SPANS)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes.values()) == {"rollout 1", "controller"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 3
    for event in complete:
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int)  # exact in microseconds
        assert {"ph", "pid", "tid", "ts", "dur", "name"} <= set(event)
    first = next(e for e in complete if e["name"] == "generate")
    assert (first["ts"], first["dur"], first["args"]) == (1_700_000_000_250_000, 2_250_000, {"turn": 0})
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == threads


def test_a_trace_is_read_back_whole_cut_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, SPANS[:2], close=False)  # killed
    assert [span[2] for span in read_trace(path)] == ["generate", "env"]
    write(path, SPANS[2:])  # resumed
    assert read_trace(path) == sorted(SPANS, key=lambda span: span[3])
    write(path, SPANS[:1])  # resumed again, after an orderly end
    assert len(read_trace(path)) == 4
    json.loads(gzip.decompress(path.read_bytes()))
    path.write_bytes(path.read_bytes()[:-9])  # cut in the middle of a member
    assert len(read_trace(path)) >= 3


def test_overlapping_spans_count_once() -> None:
    spans = [
        ("a", n, "x", 10.0 + begin, 10.0 + end, {}) for n, (begin, end) in enumerate([(0, 4), (1, 2), (3, 6)])
    ]
    assert busy_seconds(spans, 10.0, 20.0) == {("a", "x"): 6.0}
    assert busy_seconds(spans, 11.5, 14.5) == {("a", "x"): 3.0}


def test_spans_reach_the_trace_through_the_bus_and_no_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with MetricsBus([TraceFile(path)]) as bus:
        bus.emit(1, {"trace/rollout": Spans(SPANS[:2])})
        bus.emit(1, {"trace/controller": Spans(SPANS[2:])})
        record = bus.commit(1)
    assert not [name for name in record if name.startswith("trace/")]
    assert len(read_trace(path)) == 3
