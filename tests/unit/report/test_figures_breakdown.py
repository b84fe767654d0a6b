"""Cuts of acceptance are drawn from the recorded rollouts, and causes from the probe set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.metrics.runs import load_run
from rlpipe.report import figures_breakdown
from rlpipe.report.figures_breakdown import breakdown_figures
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_long_run(tmp_path / "run", steps=20, per_step=2, tokens=60)


def figure(drawn: list, title: str):
    return next(f for f in drawn if f.title == title)


def test_bars_are_sums_over_sums_of_the_judged_drafts(run: Path) -> None:
    kept, judged = [0, 0], [0, 0]
    for file in (run / "rollouts").iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            ends = [turn["span"] for turn in line["turns"] if turn["role"] == "assistant"]
            for position, accepted, tokens, _, _ in line["drafts"]:
                turn = 0 if position < ends[0][1] else 1
                reached = min(accepted + 1, len(tokens), ends[turn][1] - position)
                kept[turn] += min(accepted, reached)
                judged[turn] += reached
    (bars,) = figure(breakdown_figures([load_run(run)]), "Acceptance by turn").traces
    assert bars["x"] == ["0", "1"]
    assert bars["y"] == pytest.approx([kept[n] / judged[n] for n in (0, 1)], abs=1e-4)


def test_long_runs_are_sampled_over_their_whole_length(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures_breakdown, "MAX_FILES", 5)
    steps = {record["step"] for record in figures_breakdown._sample(load_run(run))}
    assert steps == {1, 5, 9, 13, 17}


def test_runs_without_recorded_drafts_have_no_cuts(run: Path) -> None:
    for file in (run / "rollouts").iterdir():
        lines = [json.loads(line) | {"drafts": None} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert breakdown_figures([load_run(run)]) == []
