"""Registries of drafters and objectives: every name of a setting has a row in each table that needs one."""

import pytest

from rlpipe.config.draft_objectives import SUPERVISED, DraftObjective
from rlpipe.config.drafters import KINDS, Drafter
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.drafts.objectives import supervised, windows
from rlpipe.rollout.embedded.drafters import DRAFT_MODELS

pytestmark = pytest.mark.unit


def test_every_drafter_has_properties_functions_and_where_it_has_a_directory_a_model_in_the_engine():
    assert set(KINDS) == set(DRAFTERS) == set(Drafter)
    assert set(DRAFT_MODELS) == {name for name, kind in KINDS.items() if kind.has_directory}


@pytest.mark.parametrize("name", Drafter)
def test_the_functions_of_a_drafter_fit_its_properties(name):
    kind, functions = KINDS[name], DRAFTERS[name]
    assert (functions.guess is None) == kind.has_model
    assert (functions.make_trainer is not None) == kind.has_directory
    assert (kind.served is not None) == bool(kind.sglang)
    assert kind.has_model or not kind.has_directory


def test_every_objective_learns_either_from_a_fixed_text_or_from_windows():
    assert set(supervised.OBJECTIVES) == set(SUPERVISED)
    assert set(windows.LOSSES) == set(DraftObjective) - set(SUPERVISED)


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_supervised_objective_has_exactly_one_form(name):
    objective = supervised.OBJECTIVES[name]
    forms = (objective.by_depth, objective.by_chain, objective.by_sequence)
    assert sum(form is not None for form in forms) == 1
