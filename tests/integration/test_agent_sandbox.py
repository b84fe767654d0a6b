"""Agents that are commands, honest and hostile: what reaches the endpoint, and what reaches the grader."""

from __future__ import annotations

import asyncio
import os
import socket

import psutil
import pytest

from rlpipe.config.data import DataConfig, FunctionTask
from rlpipe.config.env import AgentConfig, EnvConfig, SandboxConfig, ToolParser
from rlpipe.envs.agent.command import SandboxedCommand
from rlpipe.envs.agent.suite import AgentSuite
from rlpipe.envs.base import AgentAddress
from rlpipe.envs.sandbox.bubblewrap import ContainedBubblewrap
from rlpipe.rollout.chat import ChatFormat
from rlpipe.serve.server import AgentServer
from tests.helpers.agents import Sampler, attempt_at, templates, tokenizer_for

pytestmark = pytest.mark.integration
ASK = """
import json, os, sys, urllib.request

def ask(text, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]

def tried(act):
    try:
        return str(act())
    except BaseException as error:
        return type(error).__name__
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "Say it.", "answer": "the right answer"}\n' * 3)
    (tmp_path / "reward.py").write_text("def score(completion, answer):\n    return completion == answer\n")
    return tmp_path


def config(folder, command="/usr/bin/python3 agent.py", **agent):
    env = EnvConfig(name="agent", step_timeout_s=60, agent=AgentConfig(run=command, **agent))
    env.function = FunctionTask(
        data=DataConfig(train=str(folder / "train.jsonl")), reward=f"{folder}/reward.py:score", model=""
    )
    return env


def played(folder, monkeypatch, *scripts, **settings):
    """Run agents at once, each in a session of its own; return (answer or error, turns) of each."""
    monkeypatch.chdir(folder)
    tokenizer = tokenizer_for(templates()["qwen3"])
    chat = ChatFormat(tokenizer)

    async def one(server, number, script):
        file = folder / f"agent{number}.py"
        file.write_text(ASK + script)
        suite = AgentSuite(config(folder, f"/usr/bin/python3 {file.name}", **settings))
        sampler = Sampler(chat, len(tokenizer), number)
        attempt = attempt_at(chat, sampler, name=f"t{number}", max_turns=8, max_new_tokens=32)
        session = await server.open(attempt)
        try:
            answer = await suite.episode("train/1").run_agent(session.address)
        except RuntimeError as error:
            answer = error
        await session.close()
        return answer, attempt.trajectory.num_turns

    async def play():
        server = AgentServer("127.0.0.1", ToolParser.HERMES)
        try:
            return await asyncio.gather(*(one(server, *each) for each in enumerate(scripts)))
        finally:
            await server.close()

    return asyncio.run(play())


def running():
    """The command lines of this machine."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


HONEST = """
task = json.load(open(os.environ["RLPIPE_TASK"]))
ask(task["prompt"])
print(ask("again") is not None, task["row"]["prompt"], sorted(os.listdir(".")))
"""
# Looks for the right answer in every file that it can open, and for the agents beside it.
READER = """
ask("x")
seen = []
for top in ("/", "/proc", "/tmp", "/agent", "/work"):
    for folder, _, names in os.walk(top):
        if folder.startswith(("/usr", "/sys")):
            continue
        for name in names:
            if name in ("train.jsonl", "reward.py"):
                seen.append(folder)
            if name in ("environ", "cmdline"):
                seen += tried(lambda: open(f"{folder}/{name}").read()).count("agent0.py") * [folder]
print(seen, tried(lambda: open("TRAIN").read()), tried(lambda: os.listdir("FOLDER")))
"""
SURVIVOR = """
import subprocess
ask("x")
for _ in range(3):
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP; while :; do sleep 0.MARK; done"], start_new_session=True)
print("gone")
"""
FORGER = """
ask("x")
said = []
for path in ("REWARD", "TRAIN", "/agent/task.json", "/agent/agent3.py", "/usr/lib/python3/grade.py"):
    said.append(tried(lambda: open(path, "w").write("def score(completion, answer): return 1.0")))
print(said)
"""
CALLER = """
import socket
ask("x")
port = int(os.environ["OPENAI_BASE_URL"].rsplit(":", 1)[1].split("/")[0])
lines = [line for file in ("tcp", "tcp6") for line in open("/proc/net/" + file)]
print([line.split()[1] for line in lines if " 0A " in line] == [f"0100007F:{port:04X}"])
print(tried(lambda: ask("y", key="another")), tried(lambda: socket.create_connection(("1.1.1.1", 80), 2)))
"""


def test_hostile_agents_reach_their_own_endpoint_alone_and_no_grader(folder, monkeypatch):
    mark = str(os.getpid())
    scripts = [
        script.replace("TRAIN", f"{folder}/train.jsonl")
        .replace("REWARD", f"{folder}/reward.py")
        .replace("FOLDER", str(folder))
        .replace("MARK", mark)
        for script in (HONEST, READER, SURVIVOR, FORGER, CALLER)
    ]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    honest, reader, survivor, forger, caller = played(folder, monkeypatch, *scripts)

    assert honest == ("True Say it. []", 2)
    assert reader == ("[] FileNotFoundError FileNotFoundError", 1)
    assert survivor == ("gone", 1)
    assert not any(f"sleep 0.{mark}" in line for line in running())
    assert forger[0].count("Error") == 5, forger
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert caller == ("True\nHTTPError OSError", 1)


def test_an_agent_that_is_cancelled_ends_with_all_its_processes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    name = f"cancelled_{os.getpid()}.py"  # other tests run an agent.py at the same time
    (folder / name).write_text("import time; time.sleep(1000)")
    agent = SandboxedCommand(config(folder, f"/usr/bin/python3 {name}"))

    async def answer_at(listener: socket.socket):
        listener.close()
        raise RuntimeError("it listens")

    async def play():
        address = AgentAddress(root_url="http://127.0.0.1:4000", api_key="k", answer_at=answer_at)
        await agent(address, {})

    with pytest.raises(RuntimeError, match="it listens"):
        asyncio.run(play())
    assert not any(name in line for line in running())


@pytest.mark.parametrize(
    ("command", "agent", "says"),
    [
        ("/usr/bin/python3 agent.py train.jsonl", {}, "train.jsonl, which grades it"),
        ("/usr/bin/python3 agent.py", {"files": ["."]}, "which grades it"),
        ("/usr/bin/python3 agent.py", {"files": ["reward.py"]}, "reward.py, which grades it"),
        ("/usr/bin/python3 agent.py", {"files": ["helpers"]}, "there is no"),
        ("nosuchprogram agent.py", {}, "no program 'nosuchprogram'"),
    ],
)
def test_a_command_that_would_see_its_grader_or_cannot_run_is_refused_at_launch(
    folder, monkeypatch, command, agent, says
):
    monkeypatch.chdir(folder)
    (folder / "agent.py").write_text("")
    with pytest.raises(ValueError, match=says):
        AgentSuite(config(folder, command, **agent))


def test_what_is_shown_is_read_only_and_what_is_secret_is_empty(tmp_path):
    shown = tmp_path / "environment"
    (shown / "package").mkdir(parents=True)
    (shown / "package" / "code.py").write_text("code")
    (shown / "reward.py").write_text("secret")
    box = ContainedBubblewrap(SandboxConfig(), {}, shown=[shown], secret=[shown / "reward.py"])
    try:
        command = f"cd {shown} && cat package/code.py; cat reward.py; echo x > package/code.py"
        result = box.run(command, timeout_s=10)
    finally:
        box.cleanup()
    assert result.output.startswith("code") and "secret" not in result.output
    assert "Read-only" in result.output and (shown / "package" / "code.py").read_text() == "code"
