"""A comparison pools seeds, says what differs beyond chance, and names runs by their settings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

from rlpipe.diagnosis.comparison import compare_runs
from rlpipe.diagnosis.held_out import reward_intervals
from rlpipe.diagnosis.seeds import difference, pool_seeds
from rlpipe.metrics.bus import STEP
from rlpipe.metrics.runs import RunData
from rlpipe.report.details import arms
from rlpipe.report.figures import figures
from rlpipe.report.write import load_runs, make_content

pytestmark = pytest.mark.unit
LOW, HIGH = [0.30, 0.34, 0.32], [0.60, 0.66, 0.63]


def write_run(path: Path, seed: int, lr: float, reward: float) -> Path:
    """A run of 12 steps whose held-out reward ends at `reward`, measured on 8 instances."""
    path.mkdir(parents=True)
    sizes = {"val/a/instances": 8.0, "val/a/trajectories": 8.0}
    records = [{STEP: 0, "time": 0.0, "val/reward": 0.0, "val/a/reward": 0.0, "val/reward_se": 0.0, **sizes}]
    for step in range(1, 13):
        records.append({STEP: step, "time": 9.0 * step, "critic/rewards/mean": reward, "timing_s/step": 9.0})
        records[-1] |= {"timing_s/wait_rollout": 4.0, "timing_s/update_actor": 5.0}
    records[-1] |= {"val/reward": reward, "val/a/reward": reward, "val/reward_se": 0.1, **sizes}
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"run": {"seed": seed, "dir": str(path)}, "trainer": {"lr": lr}, "model": {"path": "m"}}
    (path / "config.yaml").write_text(json.dumps(settings))
    return path


def sweep(tmp_path: Path, rewards: dict[float, list[float]]) -> list[RunData]:
    jobs = [(seed, lr, r) for lr, values in rewards.items() for seed, r in enumerate(values)]
    return load_runs([write_run(tmp_path / str(n), *job) for n, job in enumerate(jobs)])


def test_runs_of_a_sweep_have_the_settings_that_differ_as_names(tmp_path: Path) -> None:
    runs = sweep(tmp_path, {1e-4: [0.3, 0.4], 2e-4: [0.5]})
    assert [run.name for run in runs] == ["seed=0, lr=0.0001", "seed=1, lr=0.0001", "seed=0, lr=0.0002"]
    chosen = load_runs([write_run(tmp_path / "mine", 0, 1e-4, 0.3), write_run(tmp_path / "x", 0, 2e-4, 0.3)])
    assert [run.name for run in chosen] == ["mine", "x"]  # a name that someone chose is better


def test_seeds_of_one_configuration_are_one_arm_with_an_interval_over_them(tmp_path: Path) -> None:
    pooled = pool_seeds(sweep(tmp_path, {1e-4: LOW, 2e-4: HIGH}))
    assert [arm.name for arm in pooled] == ["lr=0.0001 (3 seeds)", "lr=0.0002 (3 seeds)"]
    last = reward_intervals(pooled[1], "val/reward")[-1]
    half = 4.3027 * stdev(HIGH) / 3**0.5  # Student's t of two degrees of freedom
    assert (last.value, last.low) == pytest.approx((fmean(HIGH), fmean(HIGH) - half), abs=1e-4)
    first = reward_intervals(pooled[1], "val/reward")[0]
    assert first.low == 0 and 0.1 < first.high < 0.2  # 0 of 24, not 0 for certain


def test_the_summary_says_which_arm_is_higher_and_only_beyond_chance(tmp_path: Path) -> None:
    lines = dict(compare_runs(sweep(tmp_path / "far", {1e-4: LOW, 2e-4: HIGH})).lines)
    held_out = lines["Held-out reward"]
    assert "lr=0.0002 (3 seeds) is higher than lr=0.0001 (3 seeds) beyond chance, +0.310 [+0.2" in held_out
    assert "undecided" in lines["Seconds a step"] and "over seeds" in lines["Intervals"]
    close = compare_runs(sweep(tmp_path / "close", {1e-4: LOW, 2e-4: [0.2, 0.4, 0.45]}))
    assert "beyond chance" not in close.text() and "undecided" in close.text()


def test_single_runs_have_intervals_of_their_instances_and_the_summary_says_so(tmp_path: Path) -> None:
    lines = dict(compare_runs(sweep(tmp_path, {1e-4: [0.25], 2e-4: [0.5]})).lines)
    assert "undecided, +0.250 [" in lines["Held-out reward"]
    assert "a single run has no interval" in lines["Training reward"]
    assert "other seeds" in lines["Intervals"]


def test_equal_seeds_are_not_counted_as_several(tmp_path: Path) -> None:
    runs = load_runs([write_run(tmp_path / name, 7, 1e-4, 0.5) for name in ("a", "b")])
    assert [arm.name for arm in pool_seeds(runs)] == ["a", "b"]


def test_the_difference_has_welchs_interval() -> None:
    found = difference([1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0])
    half = 2.757 * (5 / 3 / 4 + 0.25 / 3) ** 0.5  # of 4.075 degrees of freedom; pooled they would be 5
    assert (found.value, found.low, found.high) == pytest.approx((0.0, -half, half), abs=1e-3)


def test_names_that_are_numbers_do_not_make_an_axis_of_numbers(tmp_path: Path) -> None:
    runs = load_runs([write_run(tmp_path / name, 7, 1e-4, 0.5) for name in ("0", "sorting")])
    assert [run.name for run in runs] == ["0", "sorting"]  # nothing differs that could name them
    (bars,) = [figure for figure in figures(runs) if figure.title == "Where a step's time goes"]
    assert bars.layout["yaxis"]["type"] == "category" and bars.traces[0]["y"] == ["0", "sorting"]


def test_a_page_about_seeds_shows_arms_first_and_no_error_of_zero(tmp_path: Path) -> None:
    runs = sweep(tmp_path, {1e-4: LOW, 2e-4: HIGH})
    content = make_content(runs)
    assert "(SE)" not in content.body and "±0.000" not in content.body
    assert "[0.000, 0.324]" in content.body  # 0 of 8, by Wilson
    assert content.body.index('class="summary"') < content.body.index(">Arms</h2>")
    (reward,) = [figure for figure in content.figures if figure.title == "Reward"]
    assert {t["line"]["color"] for t in reward.traces} == {"$0", "$1"} and len(reward.traces) == 4
    assert arms(runs[:2]).count("<tr>") == 2 and arms([runs[0], runs[3]]) == ""


def test_a_seed_that_failed_early_does_not_cost_its_arm_and_is_named(tmp_path: Path) -> None:
    runs = sweep(tmp_path, {1e-4: LOW, 2e-4: HIGH})
    runs[0].records = []
    runs[4].records = [record for record in runs[4].records if record[STEP] < 9]
    lines = compare_runs(runs).lines
    told = [text for label, text in lines if label == "Look at"]
    assert "seed=0, lr=0.0001: no step was recorded" in told[0]
    assert "lr=0.0002 (3 seeds) end at different steps, 8 to 12" in told[1]
    assert "lr=0.0001 (2 seeds)" in dict(lines)["Training reward"]
