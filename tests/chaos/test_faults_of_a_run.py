"""Faults that a user meets, in the real command: what is read, the exit status, what is lost.

A run of two steps, the fault, the same command with more steps. Launch, run directory, ledger, checkpoints,
metrics and console are real; the cluster is the oracle of `dying_cluster`, whose checkpoint names every group
it was trained on. Nothing is lost when at the end each prompt was trained once and each step recorded once.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from omegaconf import OmegaConf

from rlpipe import launch
from rlpipe.cli.run import run_composed
from rlpipe.config.run import Config
from rlpipe.loop import ledger_file
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.run_directory import held
from tests.helpers.dying_cluster import DyingCluster, Faults, state_of
from tests.helpers.processes import in_a_process

pytestmark = pytest.mark.chaos
PROMPTS = 3
SETTINGS = [
    "recipe=swe_rl",
    "cluster.mode=inline",
    "env.name=reasoning",
    "env.reasoning.tasks=[gcd]",
    "env.reasoning.train_size=12",
    "env.reasoning.held_out_size=2",
    f"pipeline.prompts_per_step={PROMPTS}",
    "pipeline.group_size=3",
    "run.save_every=1",
    "run.masked_window=12",
    "val.every=0",
    "metrics.report=false",
    "metrics.wandb='off'",
]


class Cluster(DyingCluster):
    def kill(self):
        """There is no process."""


def played(at, steps, *overrides, faults=None, before=lambda: None):
    """(exit status, what the user reads) of the command that runs `at`/out to so many steps."""
    settings = OmegaConf.from_dotlist([*SETTINGS, f"run.dir={at}/out", f"run.steps={steps}", *overrides])
    resolved = OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.structured(Config), settings))
    output = at / f"output_{steps}"

    def command():
        launch._make_cluster = lambda config, bus: Cluster(luck=random.Random(0), faults=faults or Faults())
        before()
        with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            faulthandler.enable(file)
            status = run_composed(resolved)
        os._exit(status)

    return in_a_process(command), output.read_text()


def check_whole(at, steps):
    """Each step recorded once, each prompt trained once, by the ledger and by the trainer."""
    records = [json.loads(line) for line in (at / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/global_step"] for record in records if "time" in record] == list(
        range(steps + 1)
    )
    ledger = Ledger(at / "out" / "ledger.sqlite")
    assert ledger.violations(ended=True) == []
    trained = ledger._db.execute("SELECT group_id FROM prompts WHERE state = 'trained'").fetchall()
    ledger.close()
    learnt = state_of(at / "out", steps)["learnt"]
    assert len(learnt) == steps * PROMPTS and sorted(learnt) == sorted(name for (name,) in trained)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A directory with a run of two steps."""
    at = tmp_path_factory.mktemp("two_steps")
    status, output = played(at, 2)
    assert status == 0, output
    check_whole(at, 2)
    return at


@pytest.fixture
def run(two_steps, tmp_path):
    """A copy of it."""
    return shutil.copytree(two_steps, tmp_path / "run")


def append(name, text):
    def damage(out):
        with (out / name).open("a") as file:
            file.write(text)

    return damage


def overwrite(name, content):
    def damage(out):
        path = out / name
        whole = path.read_bytes()
        for beside in ("-wal", "-shm"):
            (out / f"{name}{beside}").unlink(missing_ok=True)
        path.write_bytes(content(whole))

    return damage


def flip(name):
    return overwrite(name, lambda whole: whole[: len(whole) // 2] + b"X" + whole[len(whole) // 2 + 1 :])


# fault -> (what is done to the run directory, what the user reads)
DAMAGE = {
    "the ledger is cut": (
        overwrite("ledger.sqlite", lambda whole: whole[: len(whole) // 2]),
        "[fault] ledger_damaged",
    ),
    "the ledger is garbage": (
        overwrite("ledger.sqlite", lambda whole: b"no" * 5000),
        "[fault] ledger_damaged",
    ),
    "a trajectory without a step": (
        append("trajectories.jsonl", '{"reward": 1}\n'),
        "[warning] odd_lines",
    ),
    "a list among the metrics": (append("metrics.jsonl", "[1, 2]\n"), "[warning] odd_lines"),
    "half a line of events": (append("events.jsonl", '{"kind": "st'), "resumed  step=2"),
    "a foreign folder": (lambda out: (out / "checkpoints" / "step_best").mkdir(), "resumed  step=2"),
    "a byte of the newest checkpoint": (
        flip("checkpoints/step_2/trainer/learnt"),
        "checkpoint_corrupt  step=2  reason=trainer/learnt has other bytes than were written",
    ),
    "the newest checkpoint's state": (
        lambda out: (out / "checkpoints" / "step_2" / "state.json").unlink(),
        "checkpoint_corrupt  step=2  reason=state.json cannot be read",
    ),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_run_directory_is_named_and_the_run_continues_without_a_loss(run, fault):
    damage, read = DAMAGE[fault]
    damage(run / "out")
    status, output = played(run, 4)
    assert status == 0 and read in output and "Traceback" not in output, output
    check_whole(run, 4)


def limited(size):
    """No file of this process may be larger: a write beyond it fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def sentence_of(status, output):
    """The one sentence of a run that did not start."""
    assert status == 2 and "Traceback" not in output, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("rlpipe: ")]
    return sentence


def test_a_run_that_cannot_start_says_why_in_a_sentence_and_the_next_one_continues(run):
    """Each with status 2, before anything of the run is touched."""
    out = run / "out"
    no_room = sentence_of(*played(run, 4, before=lambda: limited(20_000)))
    assert "is not writable (File too large)" in no_room
    scratch = ["env.name=swe", "run.resume=anyway"]
    assert "cannot write 4 MiB into /" in sentence_of(
        *played(run, 4, *scratch, before=lambda: limited(2 << 20))
    )
    with held(out):
        assert f"process {os.getpid()}" in sentence_of(*played(run, 4))
    assert "pipeline.group_size" in sentence_of(*played(run, 4, "pipeline.group_size=2"))
    states = [out / "checkpoints" / f"step_{step}" / "state.json" for step in (1, 2)]
    texts = [state.read_text() for state in states]
    for state in states:
        state.write_text("{")
    assert "none of the checkpoints" in sentence_of(*played(run, 4))
    for state, text in zip(states, texts, strict=True):
        state.write_text(text)
    check_whole(run, 2)
    assert played(run, 4)[0] == 0
    check_whole(run, 4)


def test_attempts_that_all_fail_end_the_run_with_a_verdict_and_its_trained_checkpoints(run):
    """The sandbox's scratch disk fills during the run."""
    status, output = played(run, 4, faults=Faults(environment=1.0))
    assert status == 1 and "Traceback" not in output, output
    assert "rlpipe: 12 of the last 12 attempts were masked (run.max_masked_share=0.5)" in output
    kept = sorted(path.name for path in (run / "out" / "checkpoints").iterdir())
    assert kept == ["step_1", "step_2"]
    assert played(run, 4)[0] == 0
    check_whole(run, 4)


def test_a_ledger_that_another_process_locks_for_good_goes_on_in_memory_and_loses_nothing(run):
    hold = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
    hold += "db.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(run / "out" / "ledger.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        status, output = played(run, 4, before=lambda: setattr(ledger_file, "_LOCK_S", 0.1))
        holder.stdin.close()
    assert status == 0 and "[fault] ledger_in_memory" in output, output
    assert played(run, 5)[0] == 0
    check_whole(run, 5)


def test_a_trainer_that_is_lost_too_often_ends_the_run_with_a_sentence_and_the_next_one_continues(run):
    status, output = played(run, 4, "cluster.max_trainer_restarts=1", faults=Faults(lost=1.0))
    assert status == 1, output
    assert "the trainer was lost 2 times (cluster.max_trainer_restarts=1)" in output
    assert "Run again, it continues from the newest checkpoint." in output
    assert played(run, 4)[0] == 0
    check_whole(run, 4)
