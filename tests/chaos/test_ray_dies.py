"""Ray or the driver is killed, or the process group is asked to end: one sentence, an `end`, nothing left."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.sweep import MARK
from rlpipe.envs.sandbox.tree import scratch
from tests.helpers.cli import marked_processes, start
from tests.helpers.disturbed_runs import LONG, events

pytestmark = pytest.mark.chaos


class Run:
    """A run with what a worker leaves that is killed within a command: a folder and a control group."""

    def __init__(self, directory, *overrides, lines=1):
        self.process, self.marker = start(*LONG, *overrides, cwd=directory, lines=lines)
        self.pids = [p.pid for p in marked_processes(self.marker)]
        (worker,) = [p for p in marked_processes(self.marker) if "RolloutWorker" in " ".join(p.cmdline())][:1]
        name = f"rlpipe-sandbox-{worker.pid}-{worker.environ()[MARK]}-left"
        self.folder = scratch() / name
        self.folder.mkdir()
        self.group = cgroup.Group(name, cgroup.controllers(), memory=1 << 30, processes=99, cores=1.0)

    def process_called(self, name):
        (found,) = [p for p in marked_processes(self.marker) if p.name() == name]
        return found

    def left(self):
        """Processes, listening ports, folders and groups of the run."""
        listening = [c for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in self.pids]
        folders = [*Path("/tmp").glob(f"rlpipe-ray-{self.process.pid}-*"), self.folder]
        folders += [path for pid in self.pids for path in scratch().glob(f"rlpipe-sandbox-{pid}-*")]
        return (
            [" ".join(p.cmdline()) for p in marked_processes(self.marker)]
            + [str(c) for c in listening]
            + [str(path) for path in [*folders, *self.group.paths] if path.exists()]
        )

    def output(self):
        """What a run said that ends, once nothing of it is left."""
        output, _ = self.process.communicate(timeout=240)
        deadline = time.monotonic() + 60
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        return output


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_where_ray_is_killed_one_sentence_says_it_and_nothing_is_left(tmp_path, name):
    run = Run(tmp_path)
    run.process_called(name).kill()
    output = run.output()
    assert run.process.returncode == 1, output
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert last.startswith(f"rlpipe: Ray's process {name}") and "continues from the newest checkpoint" in last
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["failed"]


def test_where_the_driver_is_killed_nothing_is_left(tmp_path):
    run = Run(tmp_path)
    run.process.kill()
    run.output()
    assert run.process.returncode == -signal.SIGKILL


def test_a_process_group_that_is_asked_to_end_leaves_a_checkpoint_of_its_last_step(tmp_path):
    run = Run(tmp_path, "run.save_every=0", lines=2)
    os.killpg(run.process.pid, signal.SIGTERM)
    output = run.output()
    assert run.process.returncode == 0, output
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["stopped"]
    (checkpoint,) = events(tmp_path, "checkpoint")
    assert (tmp_path / "out" / "checkpoints" / checkpoint["path"]).is_dir()
