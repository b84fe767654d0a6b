"""Ray or the driver is killed, or the process group is asked to end: one sentence, an `end`, nothing left."""

import os
import signal

import pytest

from rlpipe.config.sglang import SglangConfig
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.disturbed_runs import events
from tests.helpers.killed_runs import Held, Run
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.chaos


def run_with_a_server(directory):
    """A run whose real SGLang server listens, and keeps something in /dev/shm."""
    needs_sglang()
    run = Run(
        directory,
        "rollout=sglang",
        "rollout.device=cpu",
        f"rollout.sglang.python={find_environment(SglangConfig(), on_gpu=False).python}",
        "rollout.sglang.weight_transfer=shared",
    )
    held = Held(p.pid for one in run.processes("sglang") for p in (one, *one.children(recursive=True)))
    assert held.listening() and held.entries
    return run


@pytest.mark.parametrize(("name", "start"), [("raylet", run_with_a_server), ("gcs_server", Run)])
def test_where_ray_is_killed_one_sentence_says_it_and_nothing_is_left(tmp_path, name, start):
    run = start(tmp_path)
    run.process_called(name).kill()
    output = run.output()
    assert run.process.returncode == 1, output
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert last.startswith(f"rlpipe: Ray's process {name}") and "Run again" in last
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["failed"]


def test_where_the_driver_is_killed_nothing_is_left(tmp_path):
    run = run_with_a_server(tmp_path)
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
