"""A rollout worker that dies takes no prompt with it."""

import json

import pytest

from tests.helpers.cli import SMALL, marked_processes, prompt_states, start

pytestmark = pytest.mark.chaos


def test_a_killed_rollout_worker_is_replaced_and_every_prompt_is_trained(tmp_path):
    process, marker = start("+recipe=swe_rl", *SMALL, "run.steps=12", "val.every=0", cwd=tmp_path, lines=2)
    victims = [p for p in marked_processes(marker) if "RolloutWorker" in " ".join(p.cmdline())]
    assert len(victims) == 1
    victims[0].kill()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events].count("rollout_worker_died") == 1
    assert prompt_states(tmp_path / "out") == {"trained": 24}
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["training/global_step"] == 12
    assert max(r.get("training/off_policy/trajectory_staleness/max", 0) for r in records) <= 1
