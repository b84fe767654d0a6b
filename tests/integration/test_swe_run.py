"""The main job, small: real Megatron, verl, engine and sandbox, with and without Ray."""

import json
import shutil
import signal
import time

import pytest

from tests.helpers.cli import SMALL, WITH_WANDB, marked_processes, prompt_states, run, start, undeclared

pytestmark = pytest.mark.integration

FILES = [
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "ledger.sqlite",
    "report.html",
    "wandb",
    "checkpoints/step_2",
]


LONG = ["+recipe=swe_rl", *WITH_WANDB, "run.steps=500", "val.every=0"]


def steps(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def inline_run(tmp_path_factory):
    """The folder of a finished run of two steps."""
    folder = tmp_path_factory.mktemp("inline_run")
    result = run("+recipe=swe_rl", "cluster=inline", "run.dir=out", *WITH_WANDB, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "report" in result.stdout
    return folder


def test_the_main_job_runs_and_leaves_its_files(inline_run):
    check_files_and_records(inline_run)


def test_the_main_job_runs_on_ray(tmp_path):
    result = run("+recipe=swe_rl", "cluster=ray", "run.dir=out", *WITH_WANDB, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "report" in result.stdout
    check_files_and_records(tmp_path)


def check_files_and_records(tmp_path):
    missing = [name for name in FILES if not (tmp_path / "out" / name).exists()]
    assert not missing, missing
    records = steps(tmp_path / "out")
    assert [r["training/global_step"] for r in records] == [0, 1, 2]
    last = records[-1]
    for record in records[1:]:  # a batch without signal leaves the policy untouched
        assert (record.get("actor/grad_norm") is not None) == (record["env/no_signal"] < 1)
    for name in (
        "spec/acceptance_rate",
        "spec/acceptance_length",
        "spec/acceptance_rate/depth_1",
        "rollout/entropy",
        "critic/rewards/mean",
        "training/off_policy/trajectory_staleness/max",
        "timing_s/update_actor",
        "perf/throughput",
        "val/reward",
    ):
        assert last.get(name) is not None, name
    assert last["training/off_policy/trajectory_staleness/max"] <= 1
    assert prompt_states(tmp_path / "out") == {"trained": 4}
    assert undeclared(tmp_path / "out") == []
    if "actor/grad_norm" in records[1]:
        assert records[1]["training/rollout_probs_diff_max"] < 1e-4


def test_a_finished_run_directory_is_resumed_to_more_steps(inline_run, tmp_path):
    shutil.copytree(inline_run, tmp_path, dirs_exist_ok=True)
    base = ["+recipe=swe_rl", "cluster=inline", "run.dir=out", *SMALL]
    again = run(*base, "run.steps=3", cwd=tmp_path, fresh=True)
    assert again.returncode == 0, again.stderr
    assert "mini-swe-agent" not in again.stdout + again.stderr  # the banner of a library
    assert [r["training/global_step"] for r in steps(tmp_path / "out")] == [0, 1, 2, 3]
    assert prompt_states(tmp_path / "out") == {"trained": 6}


def test_the_reasoning_recipe_runs_on_the_same_code(tmp_path):
    result = run("+recipe=reasoning_rl", "cluster=inline", "run.dir=out", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    last = steps(tmp_path / "out")[-1]
    assert last["num_turns/max"] == 1 and last["val/reward"] is not None
    assert prompt_states(tmp_path / "out") == {"trained": 4}


def none_left(marker):
    deadline = time.monotonic() + 60
    while marked_processes(marker) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [p.cmdline() for p in marked_processes(marker)] == []


@pytest.mark.parametrize("cluster", ["inline", "ray"])
def test_ctrl_c_once_finishes_cleanly_with_a_checkpoint(tmp_path, cluster):
    process, marker = start(*LONG, f"cluster={cluster}", cwd=tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    done = [r["training/global_step"] for r in steps(tmp_path / "out")][-1]
    assert (tmp_path / "out" / "checkpoints" / f"step_{done}" / "state.json").exists()
    assert (tmp_path / "out" / "report.html").exists()
    assert none_left(marker)


@pytest.mark.parametrize("cluster", ["inline", "ray"])
def test_ctrl_c_twice_stops_at_once_and_leaves_no_process(tmp_path, cluster):
    process, marker = start(*LONG, f"cluster={cluster}", cwd=tmp_path)
    process.send_signal(signal.SIGINT)
    # Two signals that arrive together are one, so wait until the first is answered.
    assert process.stdout and any("Ctrl-C again" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert none_left(marker)
