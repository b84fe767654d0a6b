"""Agents that talk to the shipped model: what is recorded, and how failures and limits end."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.config.data import DataConfig, FunctionTask
from rlpipe.config.env import AgentConfig, EnvConfig
from rlpipe.config.paths import resolve
from rlpipe.config.rollout import RolloutConfig
from rlpipe.envs import make_suite
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector
from rlpipe.serve.server import AgentServer
from rlpipe.types import Prompt, TrajectoryStatus
from tests.helpers.agents import assert_recorded
from tests.helpers.engines import recomputed, running_engine, transformers_logits

pytestmark = pytest.mark.integration
TINY = "shipped:models/tiny"
AGENT = """
from openai import OpenAI


def solve(base_url, api_key, task):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Again."}]
    return reply.content


async def forgetful(base_url, api_key, task):
    import asyncio
    from openai import AsyncOpenAI
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def ask(*messages):
        return await client.chat.completions.create(model="policy", messages=list(messages))

    first = await ask(*task["messages"])
    edited = {"role": "assistant", "content": (first.choices[0].message.content or "") + " edited"}
    await asyncio.gather(*(ask(*task["messages"], edited, {"role": "user", "content": w}) for w in "ab"))
    assert "answer" not in task["row"]


def broken(base_url, api_key, task):
    raise ValueError("no such tool")


def silent(base_url, api_key, task):
    return "never asked"


def endless(base_url, api_key, task):
    client = OpenAI(base_url=base_url, api_key=api_key)
    while True:
        client.chat.completions.create(model="policy", messages=task["messages"])
"""
REWARD = """
def score(completion, answer):
    return len(completion) % 3 / 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "my_reward.py").write_text(REWARD)
    return folder


def collected(folder, program, *, group_size=2, max_turns=6):
    """Collect a group with an engine that remembers; return its trajectories and (request, result) pairs."""
    data = DataConfig(train=str(folder / "train.jsonl"))
    env = EnvConfig(name="agent", max_turns=max_turns, threads=8, agent=AgentConfig(run=program))
    env.function = FunctionTask(data=data, reward=f"{folder}/my_reward.py:score", model=TINY)
    suite, path, sampled = make_suite(env), resolve(TINY), []

    async def play(engine):
        generate = engine.generate

        async def remembered(request):
            result = await generate(request)
            sampled.append((request, result))
            return result

        engine.generate = remembered
        agents = AgentServer("127.0.0.1", env.tools.parser)
        one = Collector(
            engine=engine,
            suite=suite,
            chat=ChatFormat.from_pretrained(path),
            rollout=RolloutConfig(max_context=256, max_new_tokens=12),
            env=env,
            agents=agents,
        )
        instance = suite.instance_ids("train")[0]
        group = await one.collect(Prompt(instance_id=instance, group_id="g"), group_size)
        await one.close()
        await agents.close()
        return group

    with running_engine(path, gamma=2, max_context=256) as engine:
        group = asyncio.run(play(engine))
    return group.trajectories, sampled


@pytest.mark.parametrize(("program", "turns", "segments"), [("solve", 2, 1), ("forgetful", 3, 3)])
def test_what_is_recorded_is_what_the_engine_sampled_with_the_models_logprobs(
    folder, program, turns, segments
):
    trajectories, sampled = collected(folder, f"{folder}/my_agent.py:{program}")
    logits = transformers_logits(resolve(TINY))
    for trajectory in trajectories:
        own = [(r, s) for r, s in sampled if r.session_id.startswith(f"{trajectory.trajectory_id}#")]
        assert_recorded(trajectory, [(SimpleNamespace(prompt=r.prompt_ids), result) for r, result in own])
        assert (trajectory.status, trajectory.num_turns) == (TrajectoryStatus.COMPLETE, turns)
        assert len(trajectory.segments()) == segments == trajectory.info["segments"]
        for request, result in own:
            expected, _ = recomputed(logits, request.prompt_ids.tolist(), result)
            assert np.abs(expected.numpy() - result.logprobs).max() < 1e-4
    assert trajectories[0].spec.verify_steps  # drafts were used


def test_a_command_gets_address_key_and_task_and_prints_its_answer(folder):
    script = folder / "command.py"
    script.write_text(
        "import json, os, urllib.request\n"
        "task = json.load(open(os.environ['RLPIPE_TASK']))\n"
        "body = json.dumps({'messages': task['messages']}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
        "print('12345')\n"
    )
    trajectories, _ = collected(folder, f"{sys.executable} {script}")
    assert [t.reward for t in trajectories] == [1.0, 1.0]  # five characters
    assert all(t.num_turns == 1 for t in trajectories)


@pytest.mark.parametrize(
    ("program", "reason", "says"),
    [
        ("my_agent.py:broken", "error", "no such tool"),
        ("my_agent.py:silent", "error", "without a request"),
        ("command", "error", "ended with status 3"),
    ],
)
def test_an_agent_that_fails_is_masked_and_never_a_zero(folder, program, reason, says):
    program = f"{folder}/{program}" if program != "command" else f"{sys.executable} -c 'raise SystemExit(3)'"
    trajectories, _ = collected(folder, program)
    assert all(t.status is TrajectoryStatus.MASKED and t.reward is None for t in trajectories)
    assert all(t.info["exit_reason"] == reason and says in t.info["error"] for t in trajectories)


def test_an_agent_that_never_ends_is_stopped_at_its_turns_and_graded(folder):
    trajectories, _ = collected(folder, f"{folder}/my_agent.py:endless", max_turns=3)
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.num_turns) == (TrajectoryStatus.COMPLETE, 3)
        assert trajectory.info["exit_reason"] == "max_turns" and trajectory.truncated
