"""The life of a task: what is recorded and with which status it ends, for each way it can end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rlpipe.config.metrics import MetricsConfig
from rlpipe.config.run import Config
from rlpipe.launch import _check_games, _note_few_instances, launch, run_task
from rlpipe.loop.checkpoints import CheckpointStore
from tests.helpers.processes import in_a_process

pytestmark = pytest.mark.unit


class Played:
    """A task that `work` plays; it has `self.stop` once a stop was requested."""

    def __init__(self, work, file):
        self.work, self.file, self.stop = work, file, False

    def prepare(self, bus, checkpoints, give_up):
        self.give_up = give_up

    def waits_for(self):
        return "nothing"

    def run(self):
        return self.work(self)

    def request_stop(self):
        self.stop = True

    def close(self, at_once):
        self.file.write_text(f"at_once={at_once}")


def signals(count):
    def work(task):
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)
        return not task.stop

    return work


def fails(task):
    raise KeyError("a defect")


@pytest.mark.parametrize(
    ("work", "outcome", "status", "at_once"),
    [
        (signals(0), "done", 0, False),
        (signals(1), "stopped", 0, False),
        (signals(2), "interrupted", 130, True),
        (lambda task: task.give_up("Ray died."), "failed", 1, True),
        (fails, "failed", 1, False),
    ],
    ids=["done", "one signal", "two signals", "given up", "a defect"],
)
def test_every_way_to_end_has_one_end_event_and_closes_the_task(tmp_path, work, outcome, status, at_once):
    closed = tmp_path / "closed"
    config = Config(metrics=MetricsConfig(report=False, wandb="off"))

    def live():
        os._exit(run_task(Played(work, closed), config, tmp_path, CheckpointStore(tmp_path, keep=1)))

    assert in_a_process(live) == status
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "end"]
    assert events[-1]["outcome"] == outcome
    assert closed.read_text() == f"at_once={at_once}"


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlpipe.launch.ReinforcementLearning", lambda *_: None)
    monkeypatch.setattr("rlpipe.launch.run_task", lambda *_: 0)
    records = tmp_path / "metrics.jsonl"
    records.write_text("".join(f'{{"training/global_step": {n}, "time": 1.0}}\n' for n in (1, 2)))
    config = Config()
    config.run.dir = str(tmp_path)
    assert launch(config, "run: {}") == 0
    assert f"starting over: {tmp_path} has records of 2 steps and no checkpoint" in capsys.readouterr().err
    assert records.read_text() == ""
    assert launch(config, "run: {}") == 0
    assert capsys.readouterr().err == ""


# Makes `leave`, of a task whose function `close` is there already.
LEAVE = """
bus = types.SimpleNamespace(event=lambda *_, **__: None, close=lambda timeout: None)
checkpoints = types.SimpleNamespace(steps=lambda: [])
leave = _Leaving(types.SimpleNamespace(close=close), bus, checkpoints)
"""


def left_by(code):
    """Run code in a fresh interpreter, which leaves with the status of a second Ctrl-C; return its errors."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130, ended.stderr
    return ended.stderr


def test_the_first_reason_to_leave_counts():
    """Ending Ray, as a second Ctrl-C does, makes Ray's end known: no reason of its own."""
    code = f"""
import threading, types
from rlpipe.launch import _Leaving
def close(at_once):
    told = threading.Thread(target=leave, args=('Ray died', 'failed', 1))
    told.start(), told.join()
{LEAVE}
leave('stopped at once', 'interrupted', 130)
"""
    errors = left_by(code)
    assert "stopped at once" in errors and "Ray died" not in errors


def test_a_second_ctrl_c_while_the_first_is_being_answered_stops_at_once():
    """Python runs a handler between two writes of a `print`, which raises where the handler prints too."""
    code = f"""
import io, os, signal, sys, types
from rlpipe.launch import _Leaving, _stopping
class Interrupting(io.RawIOBase):
    def writable(self):
        return True
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        return len(text)
def close(at_once):
    pass
{LEAVE}
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Interrupting()))
with _stopping(lambda: os.kill(os.getpid(), signal.SIGINT), leave):
    print('a line of the run', file=sys.stderr, flush=True)
"""
    errors = left_by(code)
    assert "Ctrl-C again" in errors and "stopped at once" in errors


def test_a_step_that_repeats_instances_is_said(capsys):
    _note_few_instances(8, 8)
    assert capsys.readouterr().err == ""
    _note_few_instances(3, 8)
    assert "3 training instances and pipeline.prompts_per_step=8" in capsys.readouterr().err


def test_attempts_that_leave_a_seat_of_a_game_empty_are_refused():
    from types import SimpleNamespace

    def suite(**players):
        ids = {"train": ["a"], "held_out": ["b"]}
        return SimpleNamespace(
            splits=lambda: ["held_out"], instance_ids=ids.get, players=lambda name: players.get(name, 1)
        )

    config = Config()
    config.pipeline.group_size, config.val.every, config.val.samples = 8, 1, 1
    _check_games(config, suite(a=2))
    with pytest.raises(ValueError, match=r"pipeline.group_size=8 .* 3 at a time .* 'a'.*multiple of 3"):
        _check_games(config, suite(a=3))
    with pytest.raises(ValueError, match=r"val.samples=1 .* 2 at a time .* 'b'"):
        _check_games(config, suite(b=2))
