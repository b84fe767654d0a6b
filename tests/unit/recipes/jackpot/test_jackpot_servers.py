"""The figures of the runs with SGLang servers: means over training steps, held-out rewards, faults."""

from __future__ import annotations

import json

import pytest

from recipes.jackpot.servers import measured

pytestmark = pytest.mark.unit


def test_means_are_over_training_steps_and_faults_are_counted_by_kind(tmp_path):
    step = {"timing_s/step": 2.0, "rollout_corr/obrs_acceptance": 0.9, "decoupled/kl": None}
    lines = [
        {"training/global_step": 0, "val/reward": 0.25, "val/reward_se": 0.05},
        step | {"training/global_step": 1},
        step | {"training/global_step": 2, "timing_s/step": 4.0, "val/reward": 0.5, "val/reward_se": 0.04},
    ]
    events = [("info", "start"), ("fault", "server_died"), ("fault", "server_died"), ("warning", "advice")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"level": level, "kind": kind}) + "\n" for level, kind in events)
    )
    found = measured(tmp_path)
    assert found["steps"] == 2 and found["faults"] == {"server_died": 2}
    assert found["held_out"] == [[0, 0.25, 0.05], [2, 0.5, 0.04]]
    assert found["means"] == {"accepted": 0.9, "seconds a step": 3.0}
