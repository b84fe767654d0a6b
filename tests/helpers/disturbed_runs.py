"""A run of the main job long enough to be disturbed, and what must hold at its end."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from rlpipe.loop.ledger import Ledger
from tests.helpers.cli import SMALL, prompt_states

STEPS = 8
LONG = ["+recipe=swe_rl", *SMALL, f"run.steps={STEPS}", "val.every=0", "run.save_every=2"]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """What was reported of that kind, in order."""
    lines = (directory / "out" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def wait_for(
    process: subprocess.Popen[str], directory: Path, kind: str, *, lines: int, times: int = 1
) -> None:
    """Wait until a run has reported so many events of that kind, and its metrics have so many lines."""
    metrics, until = directory / "out" / "metrics.jsonl", time.monotonic() + 180
    while len(events(directory, kind)) < times or metrics.read_text().count("\n") < lines:
        assert process.poll() is None and time.monotonic() < until, f"no {kind}, or no {lines} lines"
        time.sleep(0.1)


def check_the_end(directory: Path) -> None:
    """All steps of two prompts each, all trained once, none too stale, each step recorded once."""
    assert prompt_states(directory / "out") == {"trained": 2 * STEPS}
    ledger = Ledger(directory / "out" / "ledger.sqlite")
    assert ledger.violations(ended=True) == []
    ledger.close()
    records = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["training/global_step"] for r in records] == list(range(STEPS + 1))
    assert max(r.get("training/off_policy/trajectory_staleness/max", 0) for r in records) <= 1
