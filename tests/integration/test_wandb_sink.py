"""The real W&B, offline: the declared names arrive, and nothing is left running."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlpipe.config.metrics import WandbMode
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.sinks import WandbSink
from rlpipe.metrics.values import Last, Mean, Ratio

pytestmark = pytest.mark.integration


def test_an_offline_run_holds_the_metrics_and_ends_its_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
                    "actor/lr": Last(None),
                    "actor/grad_norm": Mean(float("nan"), 1),
                },
            )
            bus.commit(step)
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    stored = run.read_bytes()
    assert b"spec/acceptance_length" in stored and b"critic/rewards/mean" in stored
    assert "sink_disabled" not in (tmp_path / "events.jsonl").read_text()
    assert capfd.readouterr().out == ""
    after = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    _, alive = psutil.wait_procs(after, timeout=10)
    assert alive == []
