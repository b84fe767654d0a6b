"""Ray itself is killed, or the whole process group is asked to end: one sentence, an `end`, nothing left."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.cli import marked_processes, start
from tests.helpers.disturbed_runs import LONG, events

pytestmark = pytest.mark.chaos


def ended(process, marker, seconds):
    """The output of a run that ends by itself, and what is left of it a moment later."""
    output, _ = process.communicate(timeout=seconds)
    deadline = time.monotonic() + 60  # SIGKILL was sent: the kernel needs a moment
    while (left := marked_processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, [" ".join(p.cmdline()) for p in left]
    assert not list(Path("/tmp").glob(f"rlpipe-ray-{process.pid}-*"))
    return output


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_where_ray_is_killed_one_sentence_says_it_and_nothing_is_left(tmp_path, name):
    process, marker = start(*LONG, cwd=tmp_path, lines=1)
    (found,) = [p for p in marked_processes(marker) if p.name() == name]
    found.kill()
    output = ended(process, marker, 240)
    assert process.returncode == 1, output
    last = [line for line in output.splitlines() if line.strip()][-1]
    assert last.startswith(f"rlpipe: Ray's process {name}") and "continues from the newest checkpoint" in last
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["failed"]


def test_a_process_group_that_is_asked_to_end_leaves_a_checkpoint_of_its_last_step(tmp_path):
    process, marker = start(*LONG, "run.save_every=0", cwd=tmp_path, lines=2)
    os.killpg(process.pid, signal.SIGTERM)
    output = ended(process, marker, 120)
    assert process.returncode == 0, output
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["stopped"]
    (checkpoint,) = events(tmp_path, "checkpoint")
    assert (tmp_path / "out" / "checkpoints" / checkpoint["path"]).is_dir()
