"""Registries of drafters: every name of a setting has its row, in each table that must have one."""

import pytest

from rlpipe.config.drafters import KINDS, Drafter
from rlpipe.drafts.kinds import DRAFTERS
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
