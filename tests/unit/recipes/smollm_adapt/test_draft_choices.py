"""Choices of drafter and training: planted units, and the committed result from the results that it reads."""

from __future__ import annotations

import json

import pytest

from recipes.smollm_adapt import choices

pytestmark = pytest.mark.unit


def test_a_choice_made_elsewhere_loses_where_units_differ():
    units = {"a": {"x": 2.0, "y": 1.0}, "b": {"x": 4.0, "y": 2.0}, "c": {"x": 1.0, "y": 4.0}}
    found = choices.regrets(units, {"elsewhere": choices.best_elsewhere}, "x")["ways"]
    assert found["x"]["units"] == {"a": 0, "b": 0, "c": 0.75} and found["y"]["lost"][0] == pytest.approx(
        1 / 3, abs=1e-4
    )
    assert found["elsewhere"]["units"] == {"a": 0.5, "b": 0.5, "c": 0.75}  # c decides for a and b
    assert found["y"]["minus x"][0] == pytest.approx(1 / 12, abs=1e-4) and "minus x" not in found["x"]


def test_a_drafter_is_chosen_by_the_other_temperature_or_the_other_domain():
    units = {
        "swe, T = 0": {"layer": 2.0, "lookup": 1.0},
        "swe, T = 1": {"layer": 1.0, "lookup": 1.5},
        "maths, T = 0": {"layer": 0.5, "lookup": 1.0},
        "maths, T = 1": {"layer": 0.5, "lookup": 1.0},
    }
    assert choices.of_other_temperature(units, "swe, T = 1") == "layer"
    assert choices.of_other_temperature(units, "swe, T = 0") == "lookup"
    assert choices.of_other_domain(units, "swe, T = 0") == "lookup"
    assert (
        choices.of_other_domain(units, "maths, T = 1") == "layer"
    )  # loses 0 and 1/3 there, lookups 1/2 and 0


def test_an_objective_is_chosen_by_its_first_steps_and_pays_for_it_at_the_end():
    def row(early: float, end: float) -> dict:
        ends = {f"{held_out}, rejection": {"mean": [end]} for held_out in ("in domain", "out of domain")}
        return {"acceptance by step and depth": [[early] * 3] * 2 + [[9.0] * 3]} | ends

    found = choices.ten_steps({"table": {"fast": row(0.4, 0.6), "slow": row(0.3, 1.0)}}, steps=2)
    assert found["chosen"] == "fast" and found["lost"] == {"in domain": 0.2, "out of domain": 0.2}


def test_the_committed_choices_follow_from_the_committed_results():
    committed = json.loads((choices.RECIPES / "smollm_adapt" / "results" / "choices.json").read_text())
    assert committed == json.loads(json.dumps(choices.compute()))
