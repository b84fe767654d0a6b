"""A newcomer with one page of the documents: an environment and a reward, or a correction, of their own."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from rlpipe.envs.function.ready import READY
from rlpipe.models import FAMILIES
from tests.helpers.cli import ROOT, starts_ray
from tests.helpers.openenv_server import WALK_SCHEMA, openenv_server, walk
from tests.helpers.processes import run_command

pytestmark = pytest.mark.packaging


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def executed(line, folder, home):
    """What a command printed that a newcomer typed, with an empty HOME."""
    words = shlex.split(line)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    is_on_ray = words[1] == "run" and "--cfg" not in words and starts_ray(words)
    if words[0] == "rlpipe" and not is_on_ray:
        done = run_command(words[1:], cwd=folder, environment=env, timeout=300)
    else:
        command = words[1:] if words[0] == "python" else ["-m", *words]
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def play(tmp_path, page, file, *overrides):
    """The file and the command of a page, in an empty folder with an empty HOME; returns that folder."""
    (code,), (command,) = blocks(page, "python"), blocks(page, "bash")
    folder, home = tmp_path / "mine", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / file).write_text(code)
    executed(shlex.join([*shlex.split(command.replace("\\\n", " ")), *overrides]), folder, home)
    return folder


def follow(page, folder, home, replaced=()):
    """Every file and command of a page from top to bottom; returns what the commands printed.

    A file is a block after a sentence that ends with its name: "... `my_env.py`:". replaced: words of the
    commands, such as an address, by others.
    """
    home.mkdir()
    printed = []
    pattern = r"(?:`([\w/]+\.\w+)`:\n\n)?```(\w+)\n(.*?)```"
    for name, language, body in re.findall(pattern, (ROOT / "docs" / page).read_text(), flags=re.DOTALL):
        if language != "bash":
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(body)
            continue
        for line in body.replace("\\\n", " ").splitlines():
            for old, new in dict(replaced).items():
                line = line.replace(old, new)
            if line.startswith("hf ") or "+recipe=eagle3" in line or "+recipe=swe_rl" in line:
                continue  # a download; and drafts, whose own recipe is tested
            printed.append(executed(line, folder, home))
    return printed


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_page_leads_from_an_empty_folder_to_an_own_model_environment_and_reward(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    _, composed, ran, reported = follow("your_model.md", folder, tmp_path / "home")
    assert "suite: my_env:make_suite" in composed
    assert "finished after step 40/40" in ran
    records = metrics(folder / "runs" / "mine")
    before, *_, after = [r["val/reward"] for r in records if "val/reward" in r]
    assert before < 0.2 and after > 0.5
    assert (folder / "runs/mine/checkpoints/step_40/hf/model.safetensors").is_file()
    assert "report.html" in reported


def test_two_files_and_one_command_train_on_data_of_the_reader(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    checked, ran = follow("your_data.md", folder, tmp_path / "home")
    assert "data: 5 rows to train on and 1 held out (prompt: prompt, answer: answer)" in checked
    assert "nothing wrong found" in checked
    assert "finished after step 2/2" in ran


def test_a_ten_line_agent_trains_for_two_steps(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    (ran,) = follow("your_agent.md", folder, tmp_path / "home")
    assert "finished after step 2/2" in ran
    steps = [r for r in metrics(folder / "runs" / "first") if "critic/rewards/mean" in r]
    assert len(steps) == 2
    assert all(r["env/info/requests"] == 2 and r["env/info/segments"] == 1 for r in steps)
    assert all(r["env/masked"] == 0 and r["env/info/drift"] == 0 for r in steps)


def test_environments_of_every_library_are_checked_and_trained_in_as_the_page_says(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    with openenv_server(WALK_SCHEMA, sessions=64, session=walk) as url:
        printed = follow("your_environment.md", folder, tmp_path / "home", {"http://127.0.0.1:8000": url})
    trained = [said for said in printed if "finished after step 2/2" in said]
    checked = [said for said in printed if "nothing wrong found" in said]
    assert (len(trained), len(checked), len(printed)) == (3, 6, 9)

    # In self-play, what one side wins the other has lost.
    games = [r for r in metrics(folder / "runs" / "tictactoe") if "critic/rewards/mean" in r]
    rewards = [[r[f"critic/rewards/{name}"] for name in ("min", "mean", "max")] for r in games]
    assert rewards == [[-1.0, 0.0, 1.0]] * 2 and all(r["env/masked"] == 0 for r in games)


def test_data_and_rewards_of_other_frameworks_are_taken_as_they_are(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    trl, _, verl, prime_rl = follow("coming_from.md", folder, tmp_path / "home")
    assert "data: 2 rows to train on and 1 held out (prompt: prompt, answer: ground_truth)" in trl
    assert (
        "data: 20 rows to train on and 4 held out (prompt: prompt, answer: reward_model.ground_truth)" in verl
    )
    assert "data: 2 rows to train on and 1 held out (prompt: question, answer: answer)" in prime_rl
    assert all("nothing wrong found" in printed for printed in (trl, verl, prime_rl))


def test_the_page_names_every_ready_reward_with_its_options():
    page = (ROOT / "docs" / "your_data.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \|([^|]*)\|$", page, flags=re.MULTILINE))
    for name, (_, options) in READY.items():
        assert [option for option in options if f"`{option}`" not in rows[name]] == []


def test_the_page_names_every_model_family(tmp_path):
    page = (ROOT / "docs" / "your_model.md").read_text()
    (row,) = re.findall(r"^\| `model_type` \| (.*?)\. A launch", page, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(FAMILIES)


def test_the_page_alone_leads_to_a_run_with_an_own_environment_and_reward(tmp_path):
    given = ["cluster=inline", "metrics.wandb=off", "val.instances=4"]
    run = play(tmp_path, "own_environment.md", "my_env.py", *given) / "runs" / "spelling"
    records = metrics(run)
    rewards = [r["critic/rewards/mean"] for r in records if "critic/rewards/mean" in r]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "val/held_out/reward" in records[-1]
    assert (run / "report.html").is_file()
    trajectory = json.loads((run / "trajectories.jsonl").read_text().splitlines()[0])
    assert "backwards" in json.dumps(trajectory)


def test_the_page_alone_leads_to_a_run_with_an_own_advantage_loss_and_correction(tmp_path):
    """Ray, whose workers load the file by its absolute path."""
    given = ["metrics.wandb=off", "val.every=0", "injection.stale_steps=1", "pipeline.max_staleness=2"]
    run = play(tmp_path, "your_algorithm.md", "my_algorithm.py", *given) / "runs" / "mine"
    steps = [r for r in metrics(run) if "timing_s/step" in r]
    assert len(steps) == 2
    assert any(0 <= r.get("actor/user/clipped", -1) <= 1 for r in steps)
    trained = [r for r in steps if "rollout_corr/far_tokens" in r]
    assert trained
    for record in trained:
        assert 0 <= record["rollout_corr/far_tokens"] <= 1
        assert 0 <= record["rollout_corr/rollout_is_min"] <= record["rollout_corr/rollout_is_max"] <= 1.5
