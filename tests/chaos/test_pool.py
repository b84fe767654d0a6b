"""Workers join and leave a real run: by `rlpipe pool`, and by themselves."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from rlpipe.cli import pool
from rlpipe.config.sglang import SglangConfig
from rlpipe.loop.ledger import Ledger
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import SMALL, environment, marked_processes, prompt_states, start
from tests.helpers.disturbed_runs import events
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.chaos


def asked(cwd, *arguments):
    command = [sys.executable, "-m", "rlpipe", "pool", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)


def served():
    """A server for each worker, and one broadcast to all of them."""
    needs_sglang()
    python = find_environment(SglangConfig(), on_gpu=False).python
    server = ["rollout=sglang", f"rollout.sglang.python={python}", "rollout.device=cpu"]
    return [*server, "rollout.sglang.weight_transfer=collective"]


def processes_of_workers(marker):
    """How many rollout workers and SGLang servers live."""
    lines = []
    for process in marked_processes(marker):
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    servers = [line for line in lines if "sglang.launch_server" in line and "guard.py" not in line]
    return sum("RolloutWorker" in line for line in lines), len(servers)


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_worker_joins_a_running_job_and_takes_over_from_one_that_is_drained(tmp_path, engine):
    job = ["+recipe=swe_rl", *SMALL, "run.steps=2000", "val.every=0", "run.save_every=5"]
    job += served() if engine == "sglang" else []
    process, marker = start(*job, cwd=tmp_path, lines=2, timeout=600)
    assert asked(tmp_path, "list", "out").stdout.startswith("rollout worker 0: serves")
    refused = asked(tmp_path, "drain", "out", "0")
    assert refused.returncode == 2 and "rollout worker 0 is the last one: add another" in refused.stderr
    added = asked(tmp_path, "add", "out")
    assert added.returncode == 0 and "rollout workers 1 serve the newest weights" in added.stdout, added
    drained = asked(tmp_path, "drain", "out", "0", "--grace", "0")
    assert drained.returncode == 0 and "rollout worker 0 has left" in drained.stdout, drained
    until = time.monotonic() + 60  # on a busy machine processes end, or show their title, a little later
    while processes_of_workers(marker) != (1, int(engine == "sglang")):
        assert time.monotonic() < until, processes_of_workers(marker)
        time.sleep(0.5)
    unknown = asked(tmp_path, "drain", "out", "0")
    assert (
        unknown.returncode == 2 and "there is no rollout worker 0 that stays: name one of 1" in unknown.stderr
    )

    metrics = tmp_path / "out" / "metrics.jsonl"
    count, until = metrics.read_text().count("\n"), time.monotonic() + 300
    while metrics.read_text().count("\n") < count + 5:  # the run goes on with the new worker alone
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    (joined,), (left,) = (events(tmp_path, f"rollout_worker_{kind}") for kind in ("joined", "left"))
    assert joined["worker"] == 1 and joined["workers"] == 2 and left["worker"] == 0 and left["workers"] == 1
    assert not events(tmp_path, "rollout_worker_died")
    (draining,) = events(tmp_path, "rollout_worker_draining")
    assert left["rerun"] == 0  # what it played went on
    assert len(events(tmp_path, "rollout_worker_handed_over")) == (draining["in_flight"] > 0)
    records = map(json.loads, reversed(metrics.read_text().splitlines()))
    record = next(record for record in records if "weights/version" in record)
    assert record["training/global_step"] - record["weights/version"] in (0, 1)  # on its way
    assert record["training/off_policy/trajectory_staleness/max"] <= 1
    ledger = Ledger(tmp_path / "out" / "ledger.sqlite")
    assert ledger.violations(ended=False) == []
    ledger.close()
    steps = metrics.read_text().count("\n") - 1
    assert prompt_states(tmp_path / "out")["trained"] == 2 * steps


def test_a_run_whose_trainer_waits_takes_in_a_worker_by_itself(tmp_path):
    job = ["+recipe=reasoning_rl", *SMALL, "run.steps=2000", "val.every=0", "run.save_every=5"]
    waits = [
        "pipeline.max_staleness=0",
        "cluster.max_workers=2",
    ]  # in turn: the trainer waits for every group
    process, _ = start(*job, *waits, cwd=tmp_path, lines=2)
    until = time.monotonic() + 240
    while not (joined := events(tmp_path, "rollout_worker_joined")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    wanted = events(tmp_path, "pool_wanted")[0]
    assert joined[0]["worker"] == 1 and joined[0]["workers"] == 2
    assert wanted["workers"] == 1 and wanted["wanted"] == 2 and "the trainer waits" in wanted["reason"]
    assert not events(tmp_path, "pool_unchanged")
    ledger = Ledger(tmp_path / "out" / "ledger.sqlite")
    assert ledger.violations(ended=False) == []
    ledger.close()
    steps = (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") - 1
    assert prompt_states(tmp_path / "out")["trained"] == 2 * steps


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_that_is_over_is_said(tmp_path, monkeypatch, capsys, gone):
    monkeypatch.setattr(pool, "_PATIENCE_S", 0.2)
    if not gone:
        (tmp_path / "pool").mkdir()
        (tmp_path / "pool" / "workers.json").write_text("[]")
    assert pool.main(["add", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said and ("has no pool" if gone else "no run answers") in said
    assert not list((tmp_path / "pool").glob("*.json")) or not gone


def test_a_count_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        pool.main(["add", "out", "--count", "0"])
    assert ended.value.code == 2 and "name 1 or more" in capsys.readouterr().err
