"""The comparison with TRL on runs whose speeds and rewards are planted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

from against_trl import TASKS, _stored, differences, from_metrics, summary

from recipes.smollm_rl.tasks import TASKS as SCORED

pytestmark = pytest.mark.unit


def planted(seconds: float, gain: float):
    """Records of four steps that take `seconds` each and gain so much held-out reward."""
    records = [{f"val/{task}/reward": 0.0 for task in TASKS}]
    for step in range(1, 5):
        records.append(
            {
                "timing_s/step": seconds,
                "critic/rewards/mean": 0.5,
                "response_length/mean": 20.0,
                "actor/entropy": 1.0,
                **{f"val/{task}/reward": gain * step for task in TASKS},
            }
        )
    return from_metrics(records)


def test_the_tasks_are_all_that_the_recipe_scores():
    assert set(TASKS) == set(SCORED)


def test_the_slower_arm_is_compared_at_the_minutes_of_the_faster_one():
    rows = summary({"fast": [planted(10, 0.1)], "slow": [planted(80, 0.2)]})
    assert rows["slow"]["seconds_a_step"]["median"] == 80
    assert rows["slow"]["reward_at_equal_steps"]["mean"] == pytest.approx(0.8)
    assert rows["fast"]["reward_at_equal_minutes"]["mean"] == pytest.approx(0.4)

    # 40 s are half of its first step.
    assert rows["slow"]["reward_at_equal_minutes"]["mean"] == pytest.approx(0.1)


def test_an_arm_of_fewer_steps_is_compared_at_its_last_step():
    long, short = planted(10, 0.1), planted(80, 0.2)
    for part in short.values():
        del part[-2:]
    rows = summary({"long": [long], "short": [short]})
    by_steps = {arm: row["reward_at_equal_steps"]["mean"] for arm, row in rows.items()}

    # The short arm took two steps, of 160 s; the long one ended after 40 s.
    assert rows["short"]["steps"] == 2 and by_steps == pytest.approx({"long": 0.2, "short": 0.4})
    assert rows["long"]["reward_at_equal_minutes"]["mean"] == pytest.approx(0.4)


def test_rewards_are_compared_seed_by_seed():
    place = {"seeds": [0.1, 0.2, 0.6]}
    ours = {name: {"seeds": [0.4, 0.5, 0.9]} for name in ("reward_at_equal_steps", "reward_at_equal_minutes")}
    found = differences({"rlpipe": ours, "trl_bf16": dict.fromkeys(ours, place)})
    # Seeds differ much and the pairs do not: each has a difference of 0.3.
    assert found["trl_bf16"]["reward_at_equal_steps"] == {"mean": 0.3, "interval": [0.3, 0.3]}


def test_a_finished_run_is_not_repeated(tmp_path):
    made = []

    def make():
        made.append(1)
        return planted(10, 0.1)

    stored = [_stored(tmp_path, "rlpipe_0", {"steps": 4}, make) for _ in range(2)]
    assert stored == [planted(10, 0.1)] * 2 and len(made) == 1
    assert _stored(None, "rlpipe_0", {"steps": 4}, make) == planted(10, 0.1) and len(made) == 2

    with pytest.raises(ValueError, match=r"rlpipe_0\.json is a run of .*4.*, not of .*5.*another --runs"):
        _stored(tmp_path, "rlpipe_0", {"steps": 5}, make)
