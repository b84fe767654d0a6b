"""recipes/mtp_adapt/study.py: which runs it need not repeat."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from rlpipe.adapt.evaluation import DomainEvaluation, Evaluation
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("adapt_study", ROOT / "recipes/mtp_adapt/study.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("inside", "outside", "complete"),
    [
        ("swe", "", True),
        ("swe.held_instances", "", True),
        ("swe", "reasoning", False),
        ("swe,data/own.jsonl", "", False),
        ("swe.held", "", False),
    ],
)
def test_a_run_is_complete_with_its_summary_and_all_sets_that_are_asked_for(
    study, tmp_path, inside, outside, complete
):
    asked = [f"adapt.in_domain=[{inside}]", f"adapt.out_of_domain=[{outside}]", "adapt.eval_samples=1"]
    assert not study.is_complete(tmp_path, 3, asked)
    domains = {
        f"swe.{part}": DomainEvaluation(in_domain=True) for part in ("held_instances", "held_families")
    }
    measured = Evaluation(step=3, gamma=3, temperature=1.0, domains=domains)
    measured.write(study.evaluation_file(tmp_path, 3))
    assert not study.is_complete(tmp_path, 3, asked)
    (tmp_path / "results.json").touch()
    assert study.is_complete(tmp_path, 3, asked) is complete
    assert not study.is_complete(tmp_path, 4, asked)
