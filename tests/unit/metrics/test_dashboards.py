"""TensorBoard and Prometheus get what was committed, under the declared names."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from functools import reduce
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.distributions import Histogram
from rlpipe.metrics.names import metrics
from rlpipe.metrics.prometheus import PrometheusSink
from rlpipe.metrics.tensorboard import LAYOUT, TensorBoardSink
from rlpipe.metrics.values import Max, Mean, Ratio
from tests.helpers.tensorboard_file import read_events

pytestmark = pytest.mark.unit
EDGES = [-0.5, 0.5, 1.5, 2.5]


def commit_three(bus: MetricsBus) -> None:
    for step in (1, 2, 3):
        bus.emit(step, {"spec/acceptance_length": Ratio(5 * step, 2), "num_turns/max": Max(math.nan)})
        if step == 1:
            bus.emit(step, {"val/reward": Mean(1, 4)})
        bus.emit(step, {"spec/num_accepted": Histogram.of([0, 1, 1, 2], EDGES)})
        bus.commit(step)


def test_tensorboard_gets_every_finite_value_at_its_step(tmp_path: Path) -> None:
    with MetricsBus([TensorBoardSink(tmp_path / "tensorboard")]) as bus:
        commit_three(bus)
    events = read_events(tmp_path / "tensorboard")
    scalars = {
        (v.tag, e.step): v.simple_value for e in events for v in e.summary.value if not v.HasField("histo")
    }
    assert {step: scalars["spec/acceptance_length", step] for step in (1, 2, 3)} == {1: 2.5, 2: 5.0, 3: 7.5}
    assert scalars["val/reward", 1] == 0.25 and ("val/reward", 2) not in scalars
    assert not [tag for tag, _ in scalars if tag == "num_turns/max"]  # it was NaN
    (histogram,) = [v.histo for e in events for v in e.summary.value if v.HasField("histo") and e.step == 2]
    assert list(histogram.bucket) == [1, 2, 1] and list(histogram.bucket_limit) == EDGES[1:]


def test_tensorboard_lays_out_what_runs_log(tmp_path: Path) -> None:
    from tensorboardX.proto.layout_pb2 import Layout

    with MetricsBus([TensorBoardSink(tmp_path / "tensorboard")]) as bus:
        commit_three(bus)
    values = [v for e in read_events(tmp_path / "tensorboard") for v in e.summary.value]
    (written,) = [v.tensor.string_val[0] for v in values if v.tag.startswith("custom_scalars__config__")]
    charts = {c.title: list(c.multiline.tag) for k in Layout.FromString(written).category for c in k.chart}
    assert charts == {title: chart[1] for group in LAYOUT.values() for title, chart in group.items()}
    holes = {"{k}": "1", "{split}": "a", "{set}": "fixed", "{part}": "mismatch"}
    logged = [reduce(lambda name, hole: name.replace(*hole), holes.items(), m.name) for m in metrics()]
    logged += ["probe/visited/observed_rate", "training/off_policy/trajectory_staleness/mean"]
    for title, tags in charts.items():
        assert any(re.search(tag, name) for tag in tags for name in logged), title


def test_every_panel_for_grafana_asks_for_metrics_that_are_served(tmp_path: Path) -> None:
    sink = PrometheusSink("127.0.0.1", 0, dashboard=tmp_path / "grafana.json")
    with MetricsBus([sink]) as bus:
        commit_three(bus)
    written = json.loads((tmp_path / "grafana.json").read_text())
    panels = [panel for panel in written["panels"] if panel["type"] == "timeseries"]
    assert [panel["title"] for panel in panels] == [title for group in LAYOUT.values() for title in group]
    assert len({panel["id"] for panel in written["panels"]}) == len(written["panels"])

    holes = {"{k}": "1", "{split}": "a_b", "{set}": "fixed", "{part}": "mismatch"}
    names = [reduce(lambda name, hole: name.replace(*hole), holes.items(), m.name) for m in metrics()]
    names += ["val/a_b/reward", "training/off_policy/trajectory_staleness/mean"]
    served = ["rlpipe_" + re.sub(r"\W", "_", name) for name in names]  # as PrometheusSink names its gauges
    for panel in panels:
        for target in panel["targets"]:
            (expression,) = re.findall(r'__name__=~"([^"]+)"', target["expr"])
            assert "\\" not in expression and any(re.fullmatch(expression, name) for name in served), panel


def scrape(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation for family in families)
    return {s.name + str(s.labels or ""): s.value for family in families for s in family.samples}


def test_prometheus_serves_the_newest_value_of_everything_and_stops_with_the_run() -> None:
    sink = PrometheusSink("127.0.0.1", 0)
    with MetricsBus([sink]) as bus:
        commit_three(bus)
        bus.event("rollout_worker_died", worker=1)
        seen, deadline = {}, time.monotonic() + 60
        while time.monotonic() < deadline and not any("rlpipe_events" in name for name in seen):
            time.sleep(0.02)
            seen = scrape(sink.port) if sink.port else {}
        assert seen["rlpipe_spec_acceptance_length"] == 7.5
        assert seen["rlpipe_val_reward"] == 0.25  # still the one of step 1
        assert math.isnan(seen["rlpipe_num_turns_max"])
        assert seen["rlpipe_spec_num_accepted_bucket{'le': '0.5'}"] == 1
        assert seen["rlpipe_spec_num_accepted_bucket{'le': '+Inf'}"] == 4
        assert seen["rlpipe_events_total{'kind': 'rollout_worker_died', 'level': 'fault'}"] == 1
    with pytest.raises(OSError):
        scrape(sink.port)


def test_a_taken_port_costs_the_endpoint_and_not_the_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with MetricsBus([PrometheusSink("127.0.0.1", port)], events=tmp_path / "events.jsonl") as bus:
            commit_three(bus)
    written = (tmp_path / "events.jsonl").read_text()
    assert written.count("sink_disabled") == 1 and "prometheus" in written


def answer(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as got:
            return got.status, got.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_endpoint_names_the_run_and_answers_for_its_health_and_for_nothing_else() -> None:
    sink = PrometheusSink("127.0.0.1", 0, run="my_run", quiet_s=0.2)
    sink.open()
    try:
        status, text = answer(sink.port, "/metrics")
        assert status == 200 and 'rlpipe_run_info{run="my_run",version="' in text
        assert answer(sink.port, "/healthz")[0] == 200
        assert answer(sink.port, "/")[0] == answer(sink.port, "/metricsz")[0] == 404

        sink.record({"training/global_step": 3, "time": 1.0})
        status, text = answer(sink.port, "/healthz")
        assert status == 200 and json.loads(text)["step"] == 3
        time.sleep(0.25)
        status, text = answer(sink.port, "/healthz")
        assert status == 503 and json.loads(text)["state"] == "stalled"

        sink.record({"training/global_step": 4, "time": 2.0})
        assert answer(sink.port, "/healthz")[0] == 200
        sink.event({"kind": "end", "level": "info", "outcome": "failed"})
        status, text = answer(sink.port, "/healthz")
        assert status == 503 and json.loads(text)["state"] == "failed"
    finally:
        sink.close()
