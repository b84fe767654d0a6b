"""The recipe of the tiny model at toy size: all stages, a loadable checkpoint, nothing repeated."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.config.warmstart import StageConfig, TinyShape, WarmstartConfig
from rlpipe.models.checkpoint import has_mtp, read_config, read_weights
from rlpipe.warmstart.train import run_tiny_model
from tests.helpers.cli import run

pytestmark = pytest.mark.integration


def _config() -> WarmstartConfig:
    careful = {"careful": 1.0}
    return WarmstartConfig(
        held_out=8,
        instances=64,
        workers=1,
        save_every=10,
        shape=TinyShape(hidden_size=32, num_layers=2, head_dim=8, intermediate_size=64),
        skill=StageConfig(steps=60, warmup=5, mix=careful, drill=0.2, mask_wrong=True),
        imitation=StageConfig(steps=10, warmup=5, mix={"careful": 0.5, "at_once": 0.5}),
        mtp=StageConfig(steps=10, warmup=5),
    )


def test_the_recipe_makes_a_checkpoint_that_loads_and_repeats_no_finished_stage(tmp_path):
    path = run_tiny_model(_config(), tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert has_mtp(read_config(path)) and len(tokenizer) <= model.config.vocab_size
    weights = read_weights(path)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["stage"] == "skill" and rows[0]["loss"] < 6.5  # the logarithm of the vocabulary is 6.7

    (tmp_path / "mtp.pt").unlink()
    run_tiny_model(_config(), tmp_path)
    again = read_weights(path)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(rows)


def test_the_command_line_runs_the_recipe(tmp_path):
    toy = ["instances=64", "held_out=8", "workers=1", "skill.steps=4", "imitation.steps=2", "mtp.steps=2"]
    toy += ["dtype=bfloat16"]
    toy += ["shape.hidden_size=32", "shape.num_layers=2", "shape.head_dim=8", "shape.intermediate_size=64"]
    overrides = [f"warmstart.{setting}" for setting in toy]
    result = run("+recipe=tiny_model", "run.dir=out", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    model = tmp_path / "out" / "model"
    assert has_mtp(read_config(model)) and read_config(model)["dtype"] == "bfloat16"
    assert {weight.dtype for weight in read_weights(model).values()} == {torch.bfloat16}
