"""The trace in Perfetto's own trace processor: nothing is lost, and its utilisation is ours."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.spans import SpanLog, now
from rlpipe.metrics.trace import NAME, TraceFile
from rlpipe.metrics.values import Ratio, reduce
from tests.helpers.perfetto import trace_processor
from tests.helpers.traces import busy_seconds, read_trace

pytestmark = pytest.mark.integration
BUSY = {"generate": "perf/utilisation/rollout", "env": "perf/utilisation/env"}
SLICES = """
with placed as (
  select process.name as actor, slice.name as what, ts, ts + dur as over
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
  join process using (upid)
)"""
COVERED = """, reached as (
  select *, max(over) over (
    partition by actor, what order by ts, over rows between unbounded preceding and 1 preceding
  ) as before from placed
)
select actor, what, sum(max(0, over - max(ts, coalesce(before, ts)))) / 1e9 as seconds
from reached group by actor, what"""


def play(log: SpanLog, seed: int, turns: int) -> None:
    """What a trajectory does: generate and env by turns."""
    random_ = random.Random(seed)
    with log.lane() as lane:
        for turn in range(turns):
            for what in ("generate", "env"):
                with lane.span(what, turn=turn):
                    time.sleep(random_.random() / 200)


def test_the_trace_loads_without_an_error_and_its_utilisation_equals_ours(tmp_path: Path) -> None:
    """Two actors, five trajectories at once, drained and written in between; the first file is cut short."""
    logs = [SpanLog(f"rollout {n}", BUSY) for n in range(2)]
    begin = now()
    drained: list[list[dict]] = [[], []]
    for part in range(2):  # the second one is a resumed run
        with MetricsBus([TraceFile(tmp_path / NAME)]) as bus:
            threads = [
                threading.Thread(target=play, args=(log, 10 * part + n, 12)) for log in logs for n in range(5)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.01)
                for log, parts in zip(logs, drained, strict=True):
                    parts.append(log.drain())
                    bus.emit(1, parts[-1])
            for log, parts in zip(logs, drained, strict=True):
                parts.append(log.drain())
                bus.emit(1, parts[-1])
    ours = read_trace(tmp_path / NAME)
    assert len(ours) == 2 * 2 * 5 * 12 * 2
    with trace_processor(tmp_path / NAME) as perfetto:
        errors = list(perfetto.query("select name from stats where severity != 'info' and value > 0"))
        loaded = [
            (row.actor, row.what, row.ts, row.over)
            for row in perfetto.query(f"{SLICES} select * from placed order by ts, over")
        ]
        covered = {(row.actor, row.what): row.seconds for row in perfetto.query(SLICES + COVERED)}
        nested = next(iter(perfetto.query("select max(depth) as depth from slice"))).depth
    assert [row.name for row in errors] == []
    expected = sorted((a, w, round(b * 1e6) * 1000, round(e * 1e6) * 1000) for a, _, w, b, e, _ in ours)
    assert sorted(loaded) == expected
    assert nested == 0  # lanes never overlap
    by_file = busy_seconds(ours, begin, now())
    for n, parts in enumerate(drained):
        for what, metric in BUSY.items():
            key = f"rollout {n}", what
            measured: Ratio = reduce(parts)[metric]
            assert covered[key] == pytest.approx(
                measured.numerator, abs=1e-3
            )  # spans end on whole microseconds
            assert covered[key] == pytest.approx(by_file[key], abs=1e-6)
            assert 0 < measured.value() <= 1
