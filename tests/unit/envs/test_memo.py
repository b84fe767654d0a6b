"""Remembered outcomes: bounded by bytes, least recently used first, only for equal trees and commands."""

import pytest

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import local
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.sandbox.tree import tree_of

pytestmark = pytest.mark.unit
TREE = tree_of({"a": "1"})


class Machine:
    """Stands for bubblewrap: counts what really runs."""

    def __init__(self, monkeypatch, result=None, error=None):
        self.ran, self.result, self.error = [], result, error
        monkeypatch.setattr(local, "execute", self.execute)

    def execute(self, config, tree, command, *, timeout_s, stdin=b""):
        self.ran.append(command)
        if self.error:
            raise self.error
        return self.result or CommandResult(output="out", exit_code=0, seconds=1.0), dict(tree)


def test_the_same_command_on_an_equal_tree_runs_once(monkeypatch):
    machine = Machine(monkeypatch)
    runner = local.TreeRunner(SandboxConfig())
    first, _ = runner.run(TREE, "ls")
    again, left = runner.run(tree_of({"a": "1"}), "ls")
    assert machine.ran == ["ls"] and left == TREE
    assert (again.output, again.exit_code, again.seconds) == (first.output, first.exit_code, 0.0)
    assert (runner.memo.hits, runner.memo.lookups) == (1, 2)
    runner.run(tree_of({"a": "2"}), "ls")
    runner.run(TREE, "ls -a")
    runner.run(TREE, "ls", timeout_s=1.0)
    assert machine.ran == ["ls", "ls", "ls -a", "ls"]


def test_without_memo_or_with_input_everything_runs(monkeypatch):
    machine = Machine(monkeypatch)
    plain = local.TreeRunner(SandboxConfig(memo=False))
    runner = local.TreeRunner(SandboxConfig())
    for _ in range(2):
        plain.run(TREE, "ls")
        runner.run(TREE, "cat", stdin=b"x")
    assert len(machine.ran) == 4 and runner.memo.lookups == 0


def test_a_command_that_exceeded_a_limit_is_not_remembered(monkeypatch):
    machine = Machine(monkeypatch, CommandResult(output="", exit_code=137, exceeded=Limit.TIME))
    runner = local.TreeRunner(SandboxConfig())
    runner.run(TREE, "sleep 99")
    runner.run(TREE, "sleep 99")
    assert len(machine.ran) == 2


def test_a_failure_of_the_sandbox_is_raised_and_not_remembered(monkeypatch):
    machine = Machine(monkeypatch, error=InfrastructureError("no space"))
    runner = local.TreeRunner(SandboxConfig())
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="no space"):
            runner.run(TREE, "ls")
    assert len(machine.ran) == 2


def test_memory_is_bounded_and_the_least_recently_used_leaves():
    memo = local.Memo(100)
    for key in "abc":
        memo.put(key, key.upper(), size=30)
    assert memo.get("a") == "A"
    memo.put("d", "D", size=30)
    assert [memo.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    memo.put("huge", "H", size=1000)
    assert [memo.get(key) for key in ["a", "huge"]] == [None, None]
    memo.put("a", "A", size=100)
    assert memo.get("a") == "A", "room that left values took is free again"
