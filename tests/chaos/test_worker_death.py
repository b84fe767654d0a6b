"""Processes of a real run die: rollout workers, trainer, driver, sandboxes. No prompt goes with them."""

import random
import signal
import time
from contextlib import suppress

import psutil
import pytest

from rlpipe.loop.ledger import Ledger
from tests.helpers.cli import marked_processes, run, start
from tests.helpers.disturbed_runs import LONG, STEPS, check_the_end, events, wait_for

pytestmark = pytest.mark.chaos


def victim(marker, actor):
    (found,) = [p for p in marked_processes(marker) if actor in " ".join(p.cmdline())]
    return found


def test_killed_and_hung_workers_and_trainers_are_replaced_until_the_next_run_continues(tmp_path):
    """Both are killed, then both hang. A trainer that is lost once more than is allowed ends the run."""
    settings = ["cluster.hang_s=20", "cluster.max_trainer_restarts=2"]
    process, marker = start(*LONG, *settings, cwd=tmp_path, lines=2)
    victim(marker, "RolloutWorker").kill()
    wait_for(process, tmp_path, "rollout_worker_died", lines=4)
    victim(marker, "TrainerWorker").kill()
    wait_for(process, tmp_path, "resumed", lines=4)
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["step"] >= 2
    assert len(events(tmp_path, "rollout_worker_died")) == 1, "the engines go on when the trainer dies"

    victim(marker, "RolloutWorker").send_signal(signal.SIGSTOP)
    wait_for(process, tmp_path, "rollout_worker_died", lines=5, times=2)
    victim(marker, "TrainerWorker").send_signal(signal.SIGSTOP)
    wait_for(process, tmp_path, "resumed", lines=5, times=2)

    victim(marker, "TrainerWorker").kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None), output
    assert len(events(tmp_path, "rollout_worker_hung")) >= 1
    assert len(events(tmp_path, "rollout_worker_died")) == 2
    assert len(events(tmp_path, "trainer_hung")) == 1 and len(events(tmp_path, "trainer_died")) == 2
    assert len(events(tmp_path, "trainer_restarted")) == 2

    again = run(*LONG, "cluster=inline", "run.dir=out", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [event["outcome"] for event in events(tmp_path, "end")] == ["failed", "done"]
    assert len(events(tmp_path, "resumed")) == 3
    check_the_end(tmp_path)


def test_sandboxes_and_then_the_driver_are_killed_and_the_next_run_continues(tmp_path):
    luck = random.Random(0)
    process, _ = start(*LONG, "cluster=inline", cwd=tmp_path, lines=4)
    until, killed = time.monotonic() + 60, 0
    while killed < 8 and time.monotonic() < until and process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if luck.random() < 0.2 and child.name() in ("bwrap", "setpriv", "bash", "sh"):
                    child.kill()
                    killed += 1
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    again = run(*LONG, "cluster=inline", "run.dir=out", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    ledger = Ledger(tmp_path / "out" / "ledger.sqlite")
    assert ledger.violations(ended=True) == []
    assert sum(ledger.counts().values()) == 2 * STEPS
    ledger.close()
    assert killed, "no sandbox was ever seen"
