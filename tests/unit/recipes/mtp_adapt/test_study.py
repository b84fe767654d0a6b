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


BEST = {"kl_uniform": 1e-3, "kl_visit": 3e-4, "ppow": 1e-3, "ppow_plain": 3e-4}


class Counts:
    """An evaluation in which a run accepts most at one learning rate, which its arm decides."""

    def __init__(self, run):
        arm, lr = run.name.removesuffix("_seed1000").rsplit("_lr", 1)
        self.accepted = 90 if float(lr) == BEST[arm] else 50

    def counts(self, domain, mode):
        return self.accepted


def test_every_arm_is_trained_at_the_learning_rate_that_suits_it(study, tmp_path, monkeypatch):
    """Visit weighting and the variants of PPOW borrow none."""
    monkeypatch.setattr(study, "SWEEP_SEED", 1000)
    monkeypatch.setattr(study, "last_evaluation", lambda run, steps: Counts(run))
    monkeypatch.setattr(study, "estimate", lambda counts, name: study.Estimate(value=counts, se=1.0, df=9))
    monkeypatch.setattr(study.Study, "run", lambda self, name, *overrides, **options: tmp_path / name)
    args = study.arguments("", "runs").parse_args(["--lrs", "3e-4", "1e-3"])
    chosen = {
        arm: study.Study(runs=tmp_path, args=args).sweep(tmp_path, arm)[0]
        for arm in ("kl/uniform", "kl/visit")
    }
    assert chosen == {"kl/uniform": 1e-3, "kl/visit": 3e-4}

    monkeypatch.setitem(sys.modules, "study", study)
    spec = importlib.util.spec_from_file_location("ppow_study", ROOT / "recipes/ppow/study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = module.PpowStudy(runs=tmp_path, args=args)
    assert [ours.sweep(tmp_path, arm)[0] for arm in ("ppow", "ppow_plain")] == [1e-3, 3e-4]
