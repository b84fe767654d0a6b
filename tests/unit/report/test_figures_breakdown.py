"""Cuts of acceptance are drawn from the recorded rollouts, and causes from the probe set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.diagnosis import fixed_contexts
from rlpipe.diagnosis.attribution import Attribution
from rlpipe.metrics.runs import load_run
from rlpipe.metrics.statistics import Estimate
from rlpipe.report import figures_breakdown
from rlpipe.report.figures import figures
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


def test_causes_are_drawn_with_their_intervals_for_runs_with_probes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate(value: float) -> Estimate:
        return Estimate(value=value, se=0.01, df=1e9, level=0.99)

    parts = {"entropy": -0.03, "mismatch": -0.02, "staleness": 0.01, "contexts": 0.0}
    found = Attribution(
        slope=estimate(-0.5), total=estimate(-0.04), **{name: estimate(v) for name, v in parts.items()}
    )
    monkeypatch.setattr(fixed_contexts, "attribute_run", lambda run: found)
    assert not [f for f in figures([load_run(run)]) if f.title == "What moved acceptance"]
    (run / "probe").mkdir()
    drawn = figure(figures([load_run(run)]), "What moved acceptance")
    assert {t["name"]: t["x"] for t in drawn.traces} == {
        "change": [-0.04],
        "entropy": [-0.03],
        "draft mismatch": [-0.02],
        "staleness": [0.01],
        "other contexts": [0.0],
    }
    assert drawn.traces[0]["error_x"]["array"][0] == pytest.approx(2.576 * 0.01, rel=1e-2)
