"""Figures of runs with drafts: thirds of the first steps, and the split as the run's analysis gives it."""

from __future__ import annotations

import json

import pytest

from recipes.smollm_adapt import along
from rlpipe.diagnosis.acceptance_split import OVERALL, of_run
from rlpipe.metrics.runs import load_run
from tests.helpers.planted_runs import planted_run

pytestmark = pytest.mark.unit


def test_figures_are_of_the_first_and_last_third_and_the_split_is_that_of_the_analysis(tmp_path, monkeypatch):
    run = planted_run(tmp_path / "run", 0, mismatch=-0.1, entropy=-0.3)
    monkeypatch.setattr(along, "STEPS", 30)
    monkeypatch.setattr(along, "FIGURES", {"entropy": "rollout/entropy"})
    found = along.measured(run.path)

    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    entropy = [line["rollout/entropy"] for line in lines if "timing_s/step" in line]
    assert found["steps"] == 30
    assert found["figures"]["entropy"] == pytest.approx(
        [sum(entropy[:10]) / 10, sum(entropy[20:30]) / 10], abs=1e-4
    )
    part = of_run(load_run(run.path)).at(OVERALL, 30).parts["mismatch"]
    assert found["split"]["mismatch"] == pytest.approx([part.value, part.low, part.high], abs=1e-4)
