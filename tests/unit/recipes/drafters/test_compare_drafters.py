"""recipes/drafters/compare.py: what each arm is trained from and for how long, and its sums by hand."""

from __future__ import annotations

import argparse
import importlib.util
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rlpipe.cli.run  # noqa: F401  (registers the schema)
from rlpipe.config.drafters import Drafter
from rlpipe.config.paths import shipped
from rlpipe.types import SpecCounts
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
BESIDE = ("study", "drafters", "rollout_speed")  # what it imports by its folder


@pytest.fixture(scope="module")
def compare():
    path, modules = [*sys.path], {name: sys.modules.pop(name, None) for name in BESIDE}
    spec = importlib.util.spec_from_file_location("compare", ROOT / "recipes/drafters/compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    for name, before in modules.items():
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    return module


@pytest.fixture
def args(compare, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--runs", str(tmp_path / "runs"), "--steps", "20"])
    return compare.arguments()


def planned(compare, args, tmp_path, arms):
    """(name, seed, overrides, steps) of every run that is asked for, and what arms draft with."""
    asked = []

    class Planned(compare.DrafterStudy):
        def run(self, name, *overrides, seed, steps, evaluate):
            asked.append((name, seed, [*evaluate, *overrides], steps))
            return self.runs / name

    compare.adaptation.write_fresh_draft, kept = lambda *_: None, compare.adaptation.write_fresh_draft
    study = Planned(runs=tmp_path, args=args)
    paths = [study.trained(arm, seed=5) for arm in arms]
    compare.adaptation.write_fresh_draft = kept
    return asked, paths


@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_all_arms_start_alike_and_take_as_many_steps(compare, args, tmp_path, drafter):
    arms = [arm for arm in compare.ARMS if arm.startswith(drafter)]
    assert len(arms) == 7
    asked, paths = planned(compare, args, tmp_path, arms)
    product = {"mtp": "model", "eagle3": "draft"}[drafter]
    warm = {"mtp": "warm", "eagle3": "warm_eagle3"}[drafter]
    assert paths[0] == tmp_path / warm / product
    by_name = {name: (seed, set(overrides), steps) for name, seed, overrides, steps in asked}
    start = {"mtp": "model.path", "eagle3": "eagle3.start"}[drafter]
    for kind in ("hard_ce", "kl", "e2e_tv"):
        name = f"{drafter}/{kind}_seed5"
        seed, overrides, steps = by_name[name]
        assert (seed, steps) == (5, 20) and {f"draft.objective={kind}", "run.save_every=10"} <= overrides
        assert f"{start}={tmp_path / warm / product}" in overrides
        seed, overrides, steps = by_name[f"{drafter}/{kind}+ppow_seed5"]
        assert (seed, steps) == (5, 10) and "draft.objective=ppow" in overrides  # the other half of the steps
        assert f"{start}={tmp_path / name / 'checkpoints' / 'step_10' / 'hf'}" in overrides
    assert len(by_name) == 1 + 2 * 3


def test_every_run_composes(compare, args, tmp_path):
    asked, _ = planned(compare, args, tmp_path, ["mtp/kl+ppow", "eagle3/e2e_tv+ppow"])
    drafters = []
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        for _, _, overrides, steps in asked:
            given = ["+recipe=mtp_adapt", f"run.steps={steps}", *overrides]
            config = OmegaConf.to_object(compose(config_name="config", overrides=given))
            drafters.append(config.adapt.drafter)
            assert config.draft.depths == 3
    assert drafters == [Drafter.MTP] * 3 + [Drafter.EAGLE3] * 3


def test_prices_are_in_plain_steps(compare):
    suffix = {(1, 0): 2.0, (1, 3): 3.0, (8, 0): 4.0, (8, 3): 8.0}
    mtp = {(1, 0): 2.2, (1, 3): 4.5, (8, 0): 4.4, (8, 3): 11.0}
    found = compare.price({"suffix": suffix, "mtp": mtp}, 3)
    assert found["suffix"]["8"] == {"step": 2.0, "verify": 2.0, "draft": 0.0}
    assert found["mtp"]["1"] == {"step": 2.25, "verify": 1.5, "draft": 0.25}
    for row in found["mtp"].values():
        assert row["step"] == pytest.approx(3 * row["draft"] + row["verify"])


def counted(*accepted):
    """One count a conversation: verify steps of one draft each, of which so many are accepted."""
    return [SpecCounts(drafted=[4], accepted=[n], verify_steps=4, proposed=4) for n in accepted]


def test_figures_are_of_all_conversations_and_differences_are_paired(compare):
    seeds = [
        {
            "cell": {
                "none": ([100.0, 80.0], [SpecCounts(), SpecCounts()]),
                "mtp/hard_ce": ([110.0, 80.0], counted(2, 4)),
                "mtp/kl": ([200.0, 120.0], counted(more, 4)),
            }
        }
        for more in (3, 4)
    ]
    measured = compare.joined(seeds)
    speeds, counts = measured["cell"]["mtp/kl"]
    assert speeds == [200.0, 120.0] * 2 and [c.accepted for c in counts] == [[7], [8]]
    found = compare.summarise(measured, gamma=1)["cell"]
    assert found["arms"]["mtp/kl"]["acceptance_length"] == [pytest.approx(1 + 15 / 16), pytest.approx(1 / 16)]
    assert found["arms"]["mtp/kl"]["speed against none"] == pytest.approx(1.75)
    gap, error = found["differences"]["mtp/kl minus mtp/hard_ce"]["acceptance_rate"]
    assert gap == pytest.approx(3 / 16) and error == pytest.approx(3 / 16)  # 3 of 8 drafts, and none
    results = {"cost": {}, "cells": {"cell": found}}
    text = compare.markdown(results, 1, [0])
    assert "| mtp/kl minus mtp/hard_ce | +0.188 ± 0.188 | +18.75 ± 18.75 |" in text
    assert text.startswith("One seed") and "2 seeds" in compare.markdown(results, 1, [0, 1])


def test_runs_of_other_settings_are_not_taken_for_these(compare, args):
    compare.keep_settings(args)
    compare.keep_settings(argparse.Namespace(**vars(args) | {"repeats": 9, "seeds": [1], "arms": []}))
    with pytest.raises(ValueError, match="steps=20, now 40"):
        compare.keep_settings(argparse.Namespace(**vars(args) | {"steps": 40}))


@pytest.mark.parametrize("steps", ["3", "0"])
def test_an_odd_number_of_steps_is_refused(compare, monkeypatch, capsys, steps):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--steps", steps])
    with pytest.raises(SystemExit):
        compare.arguments()
    assert f"--steps {steps}" in capsys.readouterr().err
