"""PPOW through the command line: the recipe, resumed bit for bit, and co-training beside the policy."""

import json

import pytest
import torch

from rlpipe.models.checkpoint import is_mtp_weight, read_weights
from tests.helpers.cli import ROOT, SMALL, run

pytestmark = pytest.mark.integration

FEW = ["adapt.prompts=3", "adapt.samples=2", "adapt.batch=3", "adapt.eval_prompts=1", "adapt.eval_samples=1"]
FEW += ["adapt.eval_modes=[rejection]", "adapt.eval_first=false", "adapt.in_domain=[swe.held_instances]"]
FEW += ["adapt.out_of_domain=[]", "ppow.windows=2", "metrics.wandb=off"]


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_of_the_recipe_ends_bit_equal(tmp_path):
    def adapt(directory, *overrides):
        result = run("+recipe=ppow", f"run.dir={directory}", *FEW, *overrides, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        return tmp_path / directory

    constant = ["ppow.hard_start=0.5", "ppow.hard_end=0.5"]  # the curriculum is stretched over run.steps
    whole = adapt("whole", "run.steps=2", *constant)
    same = [f"adapt.rollouts={whole / 'rollouts.jsonl'}", *constant]
    adapt("parts", "run.steps=1", *same)
    parts = adapt("parts", "run.steps=2", *same)
    first, second = (read_weights(p / "model") for p in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    shipped = read_weights(ROOT / "models" / "tiny")
    moved = {name for name in first if not torch.equal(first[name], shipped[name])}
    assert moved and all(is_mtp_weight(name) for name in moved)

    last = records(parts)[-1]
    assert last["mtp/grad_norm"] > 0 and 0 <= last["ppow/accepted"] <= 3 and last["ppow/reward"] > 0
    results = json.loads((parts / "results.json").read_text())
    assert results["objective"]["loss"] == "ppow" and list(results["evaluations"]) == ["1", "2"]


def test_a_layer_adapts_by_the_exact_gradient_under_block_verification(tmp_path):
    few = [*FEW, "run.steps=1", "draft.objective=exact_block", "adapt.eval_modes=[block]"]
    result = run("+recipe=mtp_adapt", "run.dir=out", *few, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (last,) = records(tmp_path / "out")
    assert last["mtp/grad_norm"] > 0 and last["ppow/reward"] > 1 and last["ppow/close_windows"] in (0, None)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["objective"]["loss"] == "exact_block"


def test_the_draft_learns_beside_the_policy_and_a_greedy_run_is_refused(tmp_path):
    online = [
        "+recipe=swe_rl",
        "cluster=inline",
        "draft.train=online",
        "draft.objective=ppow",
        "ppow.windows=1",
        *SMALL,
        "run.steps=1",
    ]
    online += ["val.every=0", "metrics.wandb=off", "run.dir=out"]
    result = run(*online, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    last = records(tmp_path / "out")[-1]
    assert last["ppow/reward"] > 0 and last["mtp/skipped_steps"] == 0 and "actor/pg_loss" in last

    greedy = ["rollout.temperature=0", "spec.mode=greedy", "val.temperature=0"]
    result = run(*online, *greedy, "run.dir=greedy", cwd=tmp_path)
    assert result.returncode == 2 and "draft.objective=ppow verifies drafts by rejection" in result.stderr
