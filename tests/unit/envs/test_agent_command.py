"""Agents that are commands, without a sandbox: how their failures are reported."""

import asyncio
import gc
import os
import threading

import pytest

from rlpipe.config.env import AgentConfig, EnvConfig
from rlpipe.envs.agent.command import SandboxedCommand
from rlpipe.envs.base import AgentAddress, InfrastructureError
from rlpipe.envs.sandbox import CommandResult
from rlpipe.rollout.attempt import ExitReason, _describe

pytestmark = pytest.mark.unit
ADDRESS = AgentAddress(root_url="http://127.0.0.1:9", api_key="key", answer_at=None)


def command():
    return SandboxedCommand(EnvConfig(name="agent", agent=AgentConfig(run="python -c pass")))


def test_a_sandbox_that_fails_after_its_attempt_was_cancelled_is_not_reported_by_asyncio(monkeypatch, caplog):
    started = threading.Event()

    def run(self, tree, task, order, over):
        started.set()
        over.wait(10)
        raise InfrastructureError("bwrap ended with status -15")

    monkeypatch.setattr(SandboxedCommand, "_run", run)

    async def play():
        attempt = asyncio.ensure_future(command()(ADDRESS, {}))
        await asyncio.to_thread(started.wait, 10)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt

    asyncio.run(asyncio.wait_for(play(), 20))
    gc.collect()
    assert started.is_set() and [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("errors", "place"),
    [
        (
            'Traceback (most recent call last):\n  File "/agent/bad.py", line 5, in <module>\n'
            '  File "/usr/lib/python3/json.py", line 9, in loads\nKeyError: 1',
            "/agent/bad.py:5",
        ),
        ("segmentation fault", "env.agent.run='python -c pass'"),
    ],
)
def test_an_agent_that_fails_is_located_in_its_own_files(monkeypatch, errors, place):
    def run(self, tree, task, order, over):
        os.write(order["descriptors"][2], errors.encode())
        return CommandResult(exit_code=1, output=""), {}

    monkeypatch.setattr(SandboxedCommand, "_run", run)
    with pytest.raises(RuntimeError, match="ended with status 1") as failed:
        asyncio.run(command()(ADDRESS, {}))
    assert _describe(ExitReason.ERROR, failed.value)["place"] == place
