"""The bus reduces exactly, delivers in order, and survives every kind of bad sink."""

from __future__ import annotations

import errno
import json
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.metrics.bus import MAX_ERRORS, STEP, MetricsBus
from rlpipe.metrics.distributions import Histogram, Sketch
from rlpipe.metrics.jsonl import MetricsFile
from rlpipe.metrics.names import declared
from rlpipe.metrics.values import Last, Max, Mean, Min, Ratio, Sum, Value

pytestmark = pytest.mark.unit


class Recorder:
    """A sink that remembers; it can be told to fail or to wait."""

    def __init__(
        self, name: str = "recorder", *, fail: bool = False, gate: threading.Event | None = None
    ) -> None:
        self.name = name
        self.records: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.calls = 0
        self.closed = False
        self._fail, self._gate = fail, gate

    def open(self) -> None:
        if self._gate is not None:
            self._gate.wait()

    def record(self, record: dict[str, Any]) -> None:
        self.calls += 1
        if self._fail:
            raise OSError("disk full")
        self.records.append(record)

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


def test_emissions_of_one_step_are_reduced_by_sums() -> None:
    sink = Recorder()
    with MetricsBus([sink]) as bus:
        bus.emit(1, {"actor/entropy": Mean(3, 3)})
        bus.emit(2, {"actor/entropy": Mean(7, 1)})
        bus.emit(1, {"actor/entropy": Mean(5, 1), "env/masked": Sum(2)})
        record = bus.commit(1)
        bus.commit(2)
    assert record["actor/entropy"] == 2.0 and record["env/masked"] == 2.0
    assert [r[STEP] for r in sink.records] == [1, 2]
    assert sink.records[1]["actor/entropy"] == 7.0
    assert sink.closed


def test_threads_that_emit_at_once_lose_nothing() -> None:
    sink = Recorder()
    with MetricsBus([sink]) as bus:

        def report() -> None:
            for _ in range(500):
                bus.emit(1, {"env/masked": Sum(1), "num_turns/max": Max(3)})

        threads = [threading.Thread(target=report) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bus.commit(1)["env/masked"] == 2000.0


REPORTS = st.tuples(
    st.integers(1, 3),  # step
    st.integers(0, 3),  # actor
    st.lists(st.floats(-1e3, 1e3), max_size=4),  # what it observed
)
EDGES = [-0.5, 0.5, 1.5]


def report_of(seen: list[float]) -> dict[str, Value]:
    """What an actor emits about some observations, one value of every type."""
    return {
        "actor/entropy": Mean.of(seen),
        "spec/acceptance_rate": Ratio(sum(x > 0 for x in seen), len(seen)),
        "env/masked": Sum(len(seen)),
        "num_turns/max": Max.of(seen),
        "num_turns/min": Min.of(seen),
        "response_length/spread": Sketch.of(seen),
        "spec/num_accepted": Histogram.of(seen, EDGES),
    }


@settings(max_examples=80, deadline=None)
@given(reports=st.lists(REPORTS, max_size=20), random=st.randoms())
def test_any_schedule_of_reports_makes_the_records_of_a_single_process(reports: list, random: Any) -> None:
    """Actors report in threads of their own, steps mixed, some merged on the way; commits come in order."""
    by_actor: dict[int, list] = {}
    for step, actor, seen in random.sample(reports, len(reports)):
        by_actor.setdefault(actor, []).append((step, report_of(seen)))
    with MetricsBus([]) as bus:
        threads = [
            threading.Thread(target=lambda parts=parts: [bus.emit(*part) for part in parts])
            for parts in by_actor.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        records = {step: bus.commit(step) for step in (1, 2, 3)}
    for step, record in records.items():
        seen = [x for at, _, part in reports if at == step for x in part]
        alone = {name: value.value() for name, value in report_of(seen).items()}
        for part, value in (alone.pop("response_length/spread") or {}).items():
            alone[f"response_length/spread/{part}"] = value
        for name, value in alone.items():
            if name == "env/masked" and not [1 for at, *_ in reports if at == step]:
                assert name not in record  # nobody reported
            elif isinstance(value, dict) or value is None:
                assert record.get(name) == value
            else:
                assert record[name] == pytest.approx(value, abs=1e-9)


def test_a_sketch_is_recorded_in_parts_that_are_declared_and_a_histogram_whole() -> None:
    with MetricsBus([]) as bus:
        bus.emit(
            1, {"response_length/spread": Sketch.of([1, 2, 3]), "spec/num_accepted": Histogram.of([1], EDGES)}
        )
        record = bus.commit(1)
    parts = [name for name in record if name.startswith("response_length/spread/")]
    assert len(parts) == 8 and all(declared(name).name == "response_length/spread" for name in parts)
    assert record["spec/num_accepted"] == {"edges": EDGES, "counts": [0, 1]}
    with MetricsBus([]) as bus, pytest.raises(ValueError, match="declared as sketch"):
        bus.emit(1, {"response_length/spread/p50": Mean(1, 1)})


def test_a_late_emission_makes_a_second_record_with_only_what_is_new() -> None:
    sink = Recorder()
    with MetricsBus([sink]) as bus:
        bus.emit(3, {"env/masked": Sum(1)})
        bus.commit(3)
        bus.emit(3, {"val/reward": Mean(1, 2)})
    assert sink.records[1][STEP] == 3  # committed by close
    assert sink.records[1]["val/reward"] == 0.5 and "env/masked" not in sink.records[1]


def test_an_undeclared_name_or_a_wrong_type_is_refused_and_nothing_is_merged() -> None:
    with MetricsBus([]) as bus:
        with pytest.raises(ValueError, match=r"actor/entorpy.*catalogue\.toml"):
            bus.emit(1, {"env/masked": Sum(1), "actor/entorpy": Mean(1, 1)})
        with pytest.raises(ValueError, match=r"actor/lr.*declared as last.*Mean"):
            bus.emit(1, {"env/masked": Sum(1), "actor/lr": Mean(1, 1)})
        assert "env/masked" not in bus.commit(1)


def test_unobserved_metrics_are_absent_and_non_finite_ones_are_null_with_an_event(tmp_path: Path) -> None:
    sink = Recorder()
    with MetricsBus([sink, MetricsFile(tmp_path / "metrics.jsonl")]) as bus:
        bus.emit(1, {"actor/entropy": Mean(0, 0), "actor/grad_norm": Mean(math.nan, 1), "actor/lr": Last(1)})
        bus.commit(1)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert "actor/entropy" not in written
    assert written["actor/grad_norm"] is None and written["actor/lr"] == 1.0
    assert sink.events[0]["kind"] == "nonfinite_metric" and sink.events[0]["names"] == ["actor/grad_norm"]


def test_a_failing_sink_is_switched_off_with_one_event_and_the_others_go_on() -> None:
    bad, good = Recorder("bad", fail=True), Recorder("good")
    with MetricsBus([bad, good]) as bus:
        for step in range(20):
            bus.commit(step)
            time.sleep(0.002)
    assert bad.calls == MAX_ERRORS
    assert len(good.records) == 20
    assert good.kinds() == ["sink_disabled"]
    assert good.events[0]["sink"] == "bad" and "disk full" in good.events[0]["error"]


def test_a_sink_that_cannot_open_is_switched_off_with_one_event() -> None:
    class Broken(Recorder):
        def open(self) -> None:
            raise ImportError("no such library")

    good = Recorder("good")
    with MetricsBus([Broken("broken"), good]) as bus:
        for step in range(5):
            bus.commit(step)
    assert good.kinds() == ["sink_disabled"] and len(good.records) == 5


def test_a_hanging_sink_blocks_neither_reports_nor_the_others_nor_the_end() -> None:
    gate = threading.Event()
    stuck, good = Recorder("stuck", gate=gate), Recorder("good")
    bus = MetricsBus([stuck, good], queue_size=10)
    for step in range(50):
        bus.commit(step)
        wait_until(lambda step=step: len(good.records) > step)
    bus.close(timeout=0.3)
    assert [r[STEP] for r in good.records] == list(range(50))
    assert good.kinds() == ["sink_slow"]
    gate.set()


def test_a_sink_that_fails_while_closing_is_recorded_too(tmp_path: Path) -> None:
    class Unclosable(Recorder):
        def close(self) -> None:
            raise TimeoutError("upload did not finish")

    with MetricsBus([Unclosable()], events=tmp_path / "events.jsonl") as bus:
        bus.commit(1)
    assert json.loads((tmp_path / "events.jsonl").read_text())["kind"] == "sink_disabled"


def test_a_failure_now_and_then_does_not_switch_a_sink_off() -> None:
    class Flaky(Recorder):
        def record(self, record: dict[str, Any]) -> None:
            if record[STEP] % 2:
                raise OSError("try again")
            super().record(record)

    sink = Flaky()
    with MetricsBus([sink]) as bus:
        for step in range(12):
            bus.commit(step)
    assert len(sink.records) == 6 and sink.kinds() == []


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_disk_leaves_the_run_going_with_one_warning_and_is_written_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []

    def no_room(file: int, data: bytes) -> int:
        refused.append(data)
        raise OSError(errno.ENOSPC, "No space left on device")

    good = Recorder("good")
    sinks = [MetricsFile(tmp_path / "metrics.jsonl"), good]
    with caplog.at_level(logging.WARNING), MetricsBus(sinks, events=tmp_path / "events.jsonl") as bus:
        with monkeypatch.context() as full:
            full.setattr("rlpipe.metrics.jsonl.os.write", no_room)
            for step in range(1, 21):
                bus.emit(step, {"env/masked": Sum(1)})
                assert bus.commit(step)["env/masked"] == 1.0
            wait_until(lambda: len(refused) >= 21)  # 20 records, and the event that says so
        bus.commit(21)
    assert len(good.records) == 21
    assert good.kinds() == ["disk_full"] and good.events[0]["level"] == "fault"
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "disk is full" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())[STEP] == 21


def test_a_file_on_a_full_device_says_so() -> None:
    """/dev/full answers every write with ENOSPC."""
    file = MetricsFile(Path("/dev/full"))
    file.open()
    with pytest.raises(OSError) as caught:
        file.record({STEP: 1})
    assert caught.value.errno == errno.ENOSPC


def test_events_take_the_level_of_their_kind_and_reach_their_file(tmp_path: Path) -> None:
    with MetricsBus([], events=tmp_path / "events.jsonl") as bus:
        bus.event("rollout_worker_died", worker=1)
        bus.event("something_new", ratio=math.inf)
        bus.event("something_new", level="warning")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["level"]) for e in events] == [
        ("rollout_worker_died", "fault"),
        ("something_new", "info"),
        ("something_new", "warning"),
    ]
    assert events[1]["ratio"] == "inf"


def test_ten_thousand_reports_take_less_than_half_a_second_of_cpu() -> None:
    """The goal is 10^5 reports a second on one core; this leaves room for a slow machine."""
    with MetricsBus([Recorder()]) as bus:
        values = {"actor/entropy": Mean(1, 2), "env/masked": Sum(1), "num_turns/max": Max(1)}
        started = time.thread_time()
        for _ in range(3334):
            bus.emit(1, values)
        assert time.thread_time() - started < 0.5
        assert bus.commit(1)["env/masked"] == 3334


def test_importing_bus_and_sinks_pulls_in_no_heavy_library() -> None:
    heavy = ("torch", "plotly", "wandb", "rich", "ray", "omegaconf", "yaml")
    modules = "rlpipe.metrics.bus, rlpipe.metrics.sinks, rlpipe.report.write"
    code = (
        f"import sys, {modules}\nfound = [m for m in {('numpy', *heavy)!r} if m in sys.modules]\n"
        f"import rlpipe.metrics.collect\nprint([*found, *(m for m in {heavy!r} if m in sys.modules)])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
