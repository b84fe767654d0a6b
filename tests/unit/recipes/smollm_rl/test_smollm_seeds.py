"""The figures over seeds are those of the runs' own records."""

import json

import pytest

from recipes.smollm_rl.seeds import measured, summary

pytestmark = pytest.mark.unit


def run(directory, before, after):
    directory.mkdir()
    val = [
        {
            "training/global_step": step,
            "val/reward": reward,
            **{f"val/{task}/reward": reward for task in ("start", "short")},
            **{f"val/{task}/trajectories": 60 for task in ("start", "short")},
            "timing_s/validate": 30.0,
        }
        for step, reward in ((0, before), (2, after))
    ]
    step = {"timing_s/step": 60.0, "timing_s/update_actor": 45.0, "timing_s/wait_rollout": 15.0}
    lines = [val[0], step | {"rollout/entropy": 2.6}, val[1] | step | {"rollout/entropy": 2.0}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "events.jsonl").write_text('{"time": 100.0}\n{"time": 280.0}\n')
    return directory


def test_rewards_before_and_after_have_intervals_by_seed_and_over_seeds(tmp_path):
    by_seed = {
        str(n): measured(run(tmp_path / str(n), 0.1, after)) for n, after in enumerate((0.7, 0.8, 0.9))
    }
    first = by_seed["0"]
    assert first["tasks"]["start"]["after"]["reward"] == 0.7
    low, high = first["tasks"]["start"]["after"]["interval"]
    assert 0.55 < low < 0.7 < high < 0.81
    assert first["minutes"] == {
        "wait_rollout": 0.5,
        "update_actor": 1.5,
        "update_weights": 0.0,
        "validate": 1.0,
        "run": 3.0,
    }
    assert (first["steps"], first["entropy"]) == (2, [2.6, 2.0])

    over = summary(by_seed)
    assert set(over) == {"start", "short", "mean"}
    assert over["mean"]["gain"]["mean"] == pytest.approx(0.7)
    low, high = over["mean"]["gain"][
        "interval"
    ]  # Student's t of two degrees of freedom: 4.30 * 0.1 / sqrt(3)
    assert (high - low) / 2 == pytest.approx(0.248, abs=0.002)
