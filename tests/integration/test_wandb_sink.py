"""The real W&B, offline: the declared names arrive, and nothing is left running."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlpipe.config.metrics import WandbMode
from rlpipe.metrics.bus import STEP, MetricsBus
from rlpipe.metrics.distributions import SKETCH_PARTS, Histogram, Sketch
from rlpipe.metrics.names import declared
from rlpipe.metrics.sinks import WandbSink
from rlpipe.metrics.values import Last, Mean, Ratio
from tests.helpers.wandb_file import history

pytestmark = pytest.mark.integration


def test_an_offline_run_holds_the_metrics_and_ends_its_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = {f"response_length/spread/{part}" for part in SKETCH_PARTS}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sink = WandbSink(
        run_dir=tmp_path,
        mode=WandbMode.OFFLINE,
        project="rlpipe",
        group="swe_rl",
        config={"run": {"seed": 0}},
    )
    with MetricsBus([sink], events=tmp_path / "events.jsonl") as bus:
        for step in range(3):
            bus.emit(
                step,
                {
                    "spec/acceptance_length": Ratio(5, 2),
                    "critic/rewards/mean": Mean(1, 2),
                    "spec/num_accepted": Histogram((-0.5, 0.5, 1.5), [1, 2]),
                    "response_length/spread": Sketch.of([1, 2, 3]),
                    "actor/lr": Last(None),
                    "actor/grad_norm": Mean(float("nan"), 1),
                },
            )
            bus.commit(step)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    logged = history(run)
    assert [step[STEP] for step in logged] == [0, 1, 2]
    for step in logged:
        names = {name for name in step if not name.startswith("_")}  # W&B's own begin so
        assert names == {STEP, "spec/acceptance_length", "critic/rewards/mean", "spec/num_accepted", *parts}
        assert all(declared(name) for name in names)
        assert (step["spec/acceptance_length"], step["critic/rewards/mean"]) == (2.5, 0.5)
        assert (step["spec/num_accepted"]["values"], step["response_length/spread/max"]) == ([1, 2], 3)
    assert "sink_disabled" not in (tmp_path / "events.jsonl").read_text()
    assert capfd.readouterr().out == ""
    after = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    _, alive = psutil.wait_procs(after, timeout=60)
    assert alive == []
