"""A rollout worker that dies takes no prompt with it."""

import json
import sqlite3
import subprocess
import time
import uuid

import pytest

from tests.helpers.cli import SMALL, command, environment, marked_processes

pytestmark = pytest.mark.chaos


def test_a_killed_rollout_worker_is_replaced_and_every_prompt_is_trained(tmp_path):
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        command("+recipe=swe_rl", "run.dir=out", *SMALL, "run.steps=12", "val.every=0"),
        cwd=tmp_path,
        env=environment(RLPIPE_TEST_MARK=marker),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    victims = [p for p in marked_processes(marker) if "RolloutWorker" in " ".join(p.cmdline())]
    assert len(victims) == 1
    victims[0].kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events].count("rollout_worker_died") == 1
    with sqlite3.connect(tmp_path / "out" / "ledger.sqlite") as db:
        states = dict(db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
    assert states == {"trained": 24}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert records[-1]["training/global_step"] == 12
    assert max(r.get("training/off_policy/trajectory_staleness/max", 0) for r in records) <= 1
