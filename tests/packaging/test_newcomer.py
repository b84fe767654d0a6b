"""A newcomer with one page of the documents: an environment and a reward, or a correction, of their own."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def play(tmp_path, page, file, *overrides):
    """The file and the command of a page, in an empty folder with an empty HOME; returns that folder."""
    (code,), (command,) = blocks(page, "python"), blocks(page, "bash")
    folder, home = tmp_path / "mine", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / file).write_text(code)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "rlpipe.run"]
    done = subprocess.run(
        [sys.executable, *words[1:], *overrides],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cluster", ["ray", "inline"])
def test_the_page_alone_leads_to_a_run_with_an_own_environment_and_reward(tmp_path, cluster):
    given = [f"cluster={cluster}", "metrics.wandb=off", "val.instances=4"]
    run = play(tmp_path, "own_environment.md", "my_env.py", *given) / "runs" / "spelling"
    records = metrics(run)
    rewards = [r["critic/rewards/mean"] for r in records if "critic/rewards/mean" in r]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "val/held_out/reward" in records[-1]
    assert (run / "report.html").is_file()
    trajectory = json.loads((run / "trajectories.jsonl").read_text().splitlines()[0])
    assert "backwards" in json.dumps(trajectory)


def test_the_page_alone_leads_to_a_run_with_a_user_correction(tmp_path):
    """Ray, whose workers import the file from the folder the run was started in."""
    given = ["metrics.wandb=off", "val.every=0", "injection.stale_steps=1", "pipeline.max_staleness=2"]
    run = play(tmp_path, "user_correction.md", "my_correction.py", *given) / "runs" / "bounded"
    steps = [r for r in metrics(run) if "timing_s/step" in r]
    assert len(steps) == 2
    trained = [r for r in steps if "rollout_corr/far_tokens" in r]
    assert trained
    for record in trained:
        assert 0 <= record["rollout_corr/far_tokens"] <= 1
        assert 0 <= record["rollout_corr/rollout_is_min"] <= record["rollout_corr/rollout_is_max"] <= 1.5
