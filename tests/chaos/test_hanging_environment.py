"""A step that never returns, or ends its process: named, masked, and never in the way of the end of a run."""

import json
import os
import re
import signal
import time

import pytest

from tests.helpers.cli import environment
from tests.helpers.disturbed_runs import events
from tests.helpers.processes import started_command

pytestmark = pytest.mark.chaos
SUITE = """
import os
import threading
import time

from rlpipe.envs.base import SplitTable, StepResult


def make(config, seed):
    return Suite(config.options["how"])


class Suite(SplitTable):
    max_turns = 1

    def __init__(self, how):
        super().__init__({"train": ["a", "b"], "held_out": ["c"]})
        self.how = how

    def episode(self, instance_id):
        return Episode(self.how.get(instance_id) if isinstance(self.how, dict) else self.how)


class Episode:
    def __init__(self, how):
        self.how = how

    def messages(self):
        return [{"role": "user", "content": "ls"}]

    def step(self, action):
        if self.how and threading.current_thread().name != "rehearsal":
            os._exit(0) if self.how == "exits" else time.sleep(1e6)
        return StepResult(done=True, reward=1.0)

    def finish(self):
        return StepResult(done=True, reward=0.0)

    def close(self):
        pass
"""
LINE = next(number for number, line in enumerate(SUITE.splitlines(), 1) if "1e6" in line)
SETTINGS = [
    "+recipe=reasoning_rl",
    "env.suite=hanging:make",
    "run.dir=out",
    "run.steps=2",
    "pipeline.prompts_per_step=2",
    "pipeline.group_size=2",
    "rollout.max_new_tokens=4",
    "val.every=0",
    "metrics.report=false",
    "metrics.wandb='off'",
]


def started(directory, how, *overrides):
    (directory / "hanging.py").write_text(SUITE)
    settings = [*SETTINGS, f"+env.options.how={how}", *overrides]
    # A process that is forked has imported Ray, before the run could give it a token.
    fresh = "cluster=ray" in overrides
    return started_command(settings, cwd=directory, environment=environment(), fresh=fresh)


def until(condition, seconds, run):
    """Wait for something, in a run that goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert run.exitcode is None and time.monotonic() < end, run.output()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("cluster", "number"), [("inline", signal.SIGTERM), ("inline", signal.SIGINT), ("ray", signal.SIGTERM)]
)
def test_one_signal_ends_a_run_whose_step_never_returns_and_the_line_was_said(tmp_path, cluster, number):
    with started(tmp_path, "hangs", f"cluster={cluster}", "metrics.waiting_s=1") as run:
        until(lambda: "step() at" in run.output(), 300, run)
        os.kill(run.pid, number)
        asked = time.monotonic()
        run.join(20)
        assert run.exitcode == 0, run.output()
        assert time.monotonic() - asked < 20
    line = re.search(r"waiting  \d+s for groups to train on; .*step\(\) at (\S+)", run.output())
    assert line.group(1) == f"{tmp_path}/hanging.py:{LINE}", run.output()
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["stopped"]


REASONS = {
    "infrastructure": "step() did not return within env.step_timeout_s=0.3 s",
    "error": "os._exit(0) would end the run",
}


@pytest.mark.parametrize("cluster", ["inline", "ray"])
def test_a_step_that_hangs_or_exits_is_masked_with_its_line(tmp_path, cluster):
    """Each in the attempts at one of two prompts; some that exit are masked before the first that hangs."""
    settings = ["env.step_timeout_s=0.3", "env.retries=0", "run.masked_window=12", f"cluster={cluster}"]
    settings += ["pipeline.max_staleness=0"]
    with started(tmp_path, "{a: hangs, b: exits}", *settings) as run:
        run.join(300)
        assert run.exitcode == 1, run.output()
    masked = {event["reason"]: event for event in events(tmp_path, "attempt_masked")}
    assert masked.keys() == REASONS.keys()
    for reason, says in REASONS.items():
        assert says in masked[reason]["error"], json.dumps(masked)
        assert masked[reason]["place"] == f"{tmp_path}/hanging.py:{LINE}"
    assert "of the last 12 attempts were masked" in run.output()
