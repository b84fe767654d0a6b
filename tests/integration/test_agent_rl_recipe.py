"""The agent_rl recipe: two steps with real tool calls, Python in its sandbox, and how its model is made."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from recipes.agent_rl import make_model
from recipes.agent_rl.demonstrators import Demonstrator, demonstrate, tool_call
from recipes.tiny_model.data import encode_all
from recipes.tiny_model.settings import StageConfig
from rlpipe.config.env import EnvConfig
from rlpipe.config.paths import shipped
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import suite_tools
from rlpipe.envs.tools.generate import make_instance
from rlpipe.models.checkpoint import has_mtp, read_config, read_weights
from rlpipe.rollout.chat import ChatFormat
from tests.helpers.cli import SMALL, run

pytestmark = pytest.mark.integration


def test_two_steps_of_the_recipe_call_tools_and_are_rewarded(tmp_path: Path) -> None:
    result = run(
        "+recipe=agent_rl",
        "cluster=inline",
        "metrics.wandb=off",
        "run.dir=out",
        *SMALL,
        "val.instances=32",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "timing_s/step" in r]
    assert len(steps) == 2 and all(r["num_turns/mean"] > 2 for r in steps)
    first = next(r for r in records if "val/held_instances/reward" in r)
    assert 0 < first["val/held_instances/reward"] < 1  # its draws depend on the shipped weights alone
    assert {"val/held_instances/reward", "val/held_families/reward"} <= records[-1].keys()
    assert all(0 < r["spec/acceptance_length"] <= 4 for r in steps)
    played = (tmp_path / "out/trajectories.jsonl").read_text()
    assert "<tool_call>" in played and "search" in played


def test_python_runs_in_the_sandbox_with_the_documents_as_files() -> None:
    config = EnvConfig(name="tools")
    check_environment(config)
    suite = make_suite(config)
    one = make_instance("value:0")
    name, document = next(iter(one.documents.items()))
    episode = suite.episode("value:0")

    def say(code: str) -> str:
        return episode.step(tool_call("python", code=code)).observation

    assert say(f"print(open('{name}.txt').read(), end='')") == document.text
    assert say("open('note', 'w').write('kept')") == ""
    assert say("print(open('note').read())") == "kept"
    assert say("1 / 0").startswith("error: python: ZeroDivisionError")
    assert say("import os; print(os.getuid())") != "0"
    assert "error: python" in say("import urllib.request as u; u.urlopen('http://127.0.0.1:1')")
    assert say("print('x' * 10**5)").startswith("xxx") and len(say("print('x' * 10**5)")) < 500
    fresh = suite.episode("value:0")
    assert "FileNotFoundError" in fresh.step(tool_call("python", code="open('note')")).observation
    assert "error: python" in fresh.step(tool_call("python", code="\ud800\0'")).observation
    for each in (episode, fresh):
        each.close()


@pytest.mark.parametrize("who", list(Demonstrator))
def test_demonstrators_saw_what_the_environment_shows(who: Demonstrator) -> None:
    """Observations in the training data equal those of the suite, the sandbox's included."""
    suite = make_suite(EnvConfig(name="tools"))
    for index in range(3):
        messages = demonstrate(random.Random(index), make_instance(f"sum:{index}"), who)
        episode = suite.episode(f"sum:{index}")
        for said, seen in zip(messages[1:-1:2], messages[2::2], strict=True):
            assert episode.step(said["content"]).observation == seen["content"]
        assert episode.step(messages[-1]["content"]).done


def test_the_template_of_the_shipped_model_shows_the_tools_and_other_templates_are_refused() -> None:
    tools = suite_tools(make_suite(EnvConfig(name="tools")))
    chat = ChatFormat.from_pretrained(shipped("models/tiny_tools"))
    chat.check_tools(tools)
    question = {"role": "user", "content": "What is the rank of seat?"}
    opening = [
        {"role": "system", "content": make_model.signatures()},
        question,
        {"role": "assistant", "content": "3"},
    ]
    (trained,) = encode_all(make_model.extended(shipped("models/tiny"))[1], [opening], StageConfig())
    prompt = chat.initial([question], tools)
    assert trained.ids[: len(prompt)] == prompt  # rollouts start from what the model was trained on
    with pytest.raises(ValueError, match=r"does not show the tools \['search'.*env\.tools\.schema=system"):
        ChatFormat.from_pretrained(shipped("models/tiny")).check_tools(tools)
    text = tool_call("read", document="store") + ' x{"name": "y": "'
    assert chat.decode(AutoTokenizer.from_pretrained(shipped("models/tiny_tools")).encode(text)) == text


def test_the_model_is_made_at_toy_size_and_no_finished_stage_is_repeated(tmp_path: Path) -> None:
    few = {"warmup": 2, "batch_tokens": 512}
    settings = make_model.Settings(
        instances=24,
        skill=StageConfig(steps=4, mix={"careful": 1.0}, **few),
        imitation=StageConfig(steps=2, mix={"careful": 0.5, "hasty": 0.5}, **few),
        mtp=StageConfig(steps=2, **few),
    )
    first = read_weights(make_model.make(settings, tmp_path))
    assert has_mtp(read_config(tmp_path / "model"))
    assert (
        len(AutoTokenizer.from_pretrained(tmp_path / "model"))
        <= read_config(tmp_path / "model")["vocab_size"]
    )
    base = read_weights(shipped("models/tiny"))
    assert first.keys() == base.keys() and not torch.equal(first["lm_head.weight"], base["lm_head.weight"])
    (tmp_path / "mtp.pt").unlink()
    again = read_weights(make_model.make(settings, tmp_path))
    assert all(torch.equal(first[name], again[name]) for name in first)
