"""A newcomer with one page of the documents: an environment and a reward of their own."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
PAGE = ROOT / "docs" / "own_environment.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("cluster", ["ray", "inline"])
def test_the_page_alone_leads_to_a_run_with_an_own_environment_and_reward(tmp_path, cluster):
    """The file and the command of the page, in an empty folder with an empty HOME."""
    (code,), (command,) = blocks("python"), blocks("bash")
    folder, home = tmp_path / "mine", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "my_env.py").write_text(code)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "rlpipe.run"]
    done = subprocess.run(
        [sys.executable, *words[1:], f"cluster={cluster}", "metrics.wandb=off", "val.instances=4"],
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
    run = folder / "runs" / "spelling"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [r["critic/rewards/mean"] for r in records if "critic/rewards/mean" in r]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "val/held_out/reward" in records[-1]
    assert (run / "report.html").is_file()
    trajectory = json.loads((run / "trajectories.jsonl").read_text().splitlines()[0])
    assert "backwards" in json.dumps(trajectory)
