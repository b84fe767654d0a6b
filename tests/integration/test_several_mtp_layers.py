"""A checkpoint with an MTP layer for each depth, as a user runs it: before RL, and beside it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from rlpipe.models.checkpoint import is_mtp_weight, mtp_prefix, read_weights, write_checkpoint
from tests.helpers.cli import ROOT, run, undeclared
from tests.helpers.engines import generate, request, running_engine

pytestmark = pytest.mark.integration
ADAPT = ["+recipe=mtp_adapt", "run.steps=1", "adapt.prompts=4", "adapt.samples=1", "adapt.batch=4"]
ADAPT += ["adapt.eval_prompts=2", "adapt.eval_samples=1", "adapt.in_domain=[swe.held_instances]"]
ADAPT += ["adapt.out_of_domain=[]", "metrics.wandb=off"]
TEACH = ["+recipe=swe_rl", "cluster=inline", "run.steps=2", "run.save_every=2", "metrics.report=false"]
TEACH += ["pipeline.prompts_per_step=2", "pipeline.group_size=4", "val.every=0", "metrics.wandb=off"]
TEACH += ["draft.train=online", "trainer.warmup_steps=0"]


@pytest.fixture
def two_layers(tmp_path):
    """The shipped model with its MTP layer twice, so that the second has something to learn."""
    path, shipped = tmp_path / "two", ROOT / "models" / "tiny"
    shutil.copytree(shipped, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((shipped / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    weights = read_weights(shipped)
    for name in [name for name in weights if is_mtp_weight(name)]:
        weights[name.replace(mtp_prefix(0), mtp_prefix(1))] = weights[name].clone()
    write_checkpoint(path, weights, like=path)
    return path


def moved(before, after):
    """Prefixes of the draft's layers that differ, and whether the rest does."""
    first, second = read_weights(before), read_weights(after)
    assert first.keys() == second.keys()
    names = {name for name, weight in first.items() if not torch.equal(weight, second[name])}
    layers = {mtp_prefix(i) for i in range(2) if any(name.startswith(mtp_prefix(i)) for name in names)}
    return layers, any(not is_mtp_weight(name) for name in names)


def test_both_layers_are_adapted_then_learn_in_rl_and_draft(tmp_path, two_layers):
    both = {mtp_prefix(0), mtp_prefix(1)}
    result = run(*ADAPT, "run.dir=adapted", f"model.path={two_layers}", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    adapted = tmp_path / "adapted" / "model"
    assert moved(two_layers, adapted) == (both, False)
    last = json.loads((tmp_path / "adapted" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["adapt/swe.held_instances/predicted_tokens_per_step"] > 1

    result = run(*TEACH, "run.dir=taught", f"model.path={adapted}", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = [json.loads(s) for s in (tmp_path / "taught" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "mtp/grad_norm" in step]
    assert trained and all(step["mtp/alpha/depth_3"] > 0 for step in trained)
    assert any(step.get("spec/acceptance_rate/depth_3", 0) > 0 for step in steps), sorted(steps[-1])
    taught = tmp_path / "taught" / "checkpoints" / "step_2" / "hf"
    assert moved(adapted, taught) == (both, True)
    assert undeclared(tmp_path / "taught") == []
    with running_engine(taught) as engine:
        assert len(generate(engine, request(0, [5, 6, 7], max_new_tokens=8))[0].output_ids)


def test_a_server_that_holds_one_layer_is_refused_by_name(tmp_path, two_layers):
    result = run(*TEACH, "rollout=sglang", f"model.path={two_layers}", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "holds one MTP layer and would load the 2 of" in result.stderr
