"""`--multirun` plays every job in a process and a directory of its own; a directory has one driver."""

import subprocess
import sys

import pytest

from tests.helpers.cli import SMALL, environment, run

pytestmark = pytest.mark.integration

SWEPT = [
    "--multirun",
    "+recipe=swe_rl",
    "cluster=inline",
    *SMALL,
    "run.steps=1",
    "run.dir=out",
    "val.every=0",
]


def test_a_sweep_plays_every_job_also_behind_one_that_is_refused(tmp_path):
    result = run(*SWEPT, "run.seed=0,1", "spec.gamma=0,3", cwd=tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    table = [line.split() for line in result.stdout.splitlines() if line.startswith(f"{tmp_path}/out/")]
    assert [(row[0][-1], row[-2:]) for row in table] == [
        ("0", ["run.seed=0", "spec.gamma=0"]),
        ("1", ["run.seed=0", "spec.gamma=3"]),
        ("2", ["run.seed=1", "spec.gamma=0"]),
        ("3", ["run.seed=1", "spec.gamma=3"]),
    ]
    assert ["done" in row for row in table] == [False, True, False, True]
    for number in (0, 2):
        assert f"out/{number} (run.seed={number // 2} spec.gamma=0) ended with status 2" in result.stderr
    assert result.stderr.count("spec.gamma=0 drafts nothing") == 2
    assert (tmp_path / "out" / "compare.html").exists()
    assert not (tmp_path / "out" / "0" / "metrics.jsonl").exists()


def test_a_second_driver_and_other_settings_are_refused(tmp_path):
    base = ["+recipe=swe_rl", "cluster=inline", *SMALL, "val.every=0", "run.dir=out"]
    first = subprocess.Popen(
        [sys.executable, "-m", "rlpipe", "run", *base],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in first.stdout:  # it has the directory by now
        if line.startswith("[phase]"):
            break
    second = run(*base, cwd=tmp_path)
    assert second.returncode == 2 and f"is in use by process {first.pid} on " in second.stderr, second.stderr
    first.communicate()
    assert first.returncode == 0
    other = run(*base, "run.steps=3", "run.seed=1", "algo.advantage=rloo", cwd=tmp_path)
    assert other.returncode == 2
    assert "at step 2 with other settings: " in other.stderr and "run.seed: 0 -> 1" in other.stderr
    assert "algo.advantage: grpo -> rloo" in other.stderr and "run.resume=anyway" in other.stderr
    assert "steps: 2" in (tmp_path / "out" / "config.yaml").read_text()
    wanted = run(*base, "run.steps=3", "run.seed=1", "run.resume=anyway", cwd=tmp_path)
    assert wanted.returncode == 0 and "finished after step 3/3" in wanted.stdout
    assert len(list((tmp_path / "out" / "configs").iterdir())) == 2
    table = subprocess.run(
        [sys.executable, "-m", "rlpipe", "runs", "."],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert table.stdout.splitlines()[1].split()[:4] == ["out", "swe_rl", "done", "3/3"]
