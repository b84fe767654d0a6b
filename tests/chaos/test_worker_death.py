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


def test_a_killed_rollout_worker_is_replaced_and_a_killed_trainer_continues_from_its_checkpoint(tmp_path):
    process, marker = start(*LONG, cwd=tmp_path, lines=2)
    victim(marker, "RolloutWorker").kill()
    wait_for(process, tmp_path, "rollout_worker_died", lines=5)
    victim(marker, "TrainerWorker").kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert len(events(tmp_path, "trainer_died")) == len(events(tmp_path, "trainer_restarted")) == 1
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["step"] >= 2 and events(tmp_path, "end")[0]["outcome"] == "done"
    assert len(events(tmp_path, "rollout_worker_died")) == 1, "the engines go on when the trainer dies"
    check_the_end(tmp_path)


def test_a_hung_rollout_worker_and_a_hung_trainer_are_killed_and_replaced(tmp_path):
    process, marker = start(*LONG, "cluster.hang_s=20", cwd=tmp_path, lines=2)
    victim(marker, "RolloutWorker").send_signal(signal.SIGSTOP)
    wait_for(process, tmp_path, "rollout_worker_died", lines=4)
    victim(marker, "TrainerWorker").send_signal(signal.SIGSTOP)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert len(events(tmp_path, "rollout_worker_hung")) >= 1
    assert len(events(tmp_path, "rollout_worker_died")) == 1
    assert len(events(tmp_path, "trainer_hung")) == len(events(tmp_path, "trainer_restarted")) == 1
    check_the_end(tmp_path)


def test_where_no_restart_is_allowed_a_killed_trainer_ends_the_run_and_the_next_one_continues_it(tmp_path):
    process, marker = start(*LONG, "cluster.max_trainer_restarts=0", cwd=tmp_path, lines=5)
    victim(marker, "TrainerWorker").kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode not in (0, None), output
    assert len(events(tmp_path, "trainer_died")) == 1
    again = run(*LONG, "cluster=inline", "run.dir=out", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(events(tmp_path, "resumed")) == 1
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
