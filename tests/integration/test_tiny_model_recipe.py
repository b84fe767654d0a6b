"""The recipe of the tiny model at toy size: all stages, a loadable checkpoint, nothing repeated."""

import json
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny_model.card import SETS
from recipes.tiny_model.generate import dedup_keys, generate
from recipes.tiny_model.make import compose, run_tiny_model
from recipes.tiny_model.make_moe import make as make_moe
from recipes.tiny_model.settings import MoeSettings, Settings, StageConfig, TinyShape
from rlpipe.config.paths import shipped
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import check_weights, has_mtp, read_config, read_weights
from tests.helpers.cli import environment
from tests.helpers.documents import DOCUMENTS, commands

pytestmark = pytest.mark.integration


def make(*arguments, cwd):
    """`python -m recipes.tiny_model.make`."""
    return subprocess.run(
        [sys.executable, "-m", "recipes.tiny_model.make", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def _records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def _config() -> Settings:
    careful = {"careful": 1.0}
    return Settings(
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


@pytest.mark.parametrize(
    ("override", "named"),
    [("gama=2", "gama"), ("gamma=many", "many"), ("gamma=0", "gamma=0"), ("skill.drill=2", "drill=2")],
)
def test_settings_that_are_unknown_or_impossible_are_refused(override, named):
    with pytest.raises(ValueError, match=named):
        compose([override])


def test_the_command_line_names_a_wrong_setting_and_writes_nothing(tmp_path):
    result = make("--run-dir", "out", "gama=2", cwd=tmp_path)
    assert result.returncode == 1 and "gama" in result.stderr and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_documented_settings_compose():
    module = ("python", "-m", "recipes.tiny_model.make")
    documented = [c for d in DOCUMENTS for c in commands(d) if c.words[:3] == module]
    given = [[word for word in command.words if "=" in word] for command in documented]
    assert sum(map(bool, given)) >= 2
    assert all(compose(overrides) for overrides in given)


def test_the_generator_refuses_training_data_that_is_held_out(tmp_path):
    generate(tmp_path, train=30, held=4, seed=0, workers=1)
    sets = {name: _records(tmp_path / f"{name}.jsonl") for name in (*SETS, "train")}
    assert {name: len(records) for name, records in sets.items()} == dict.fromkeys(SETS, 4) | {"train": 30}
    held = {key for name in SETS for record in sets[name] for key in dedup_keys(record)}
    assert not held.intersection(key for record in sets["train"] for key in dedup_keys(record))


def test_the_command_line_makes_the_model(tmp_path):
    toy = ["instances=64", "held_out=8", "workers=1", "skill.steps=4", "imitation.steps=2", "mtp.steps=2"]
    toy += ["dtype=bfloat16"]
    toy += ["shape.hidden_size=32", "shape.num_layers=2", "shape.head_dim=8", "shape.intermediate_size=64"]
    result = make("--run-dir", "out", *toy, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert OmegaConf.load(tmp_path / "out" / "config.yaml").shape.hidden_size == 32
    model = tmp_path / "out" / "model"
    assert has_mtp(read_config(model)) and read_config(model)["dtype"] == "bfloat16"
    assert {weight.dtype for weight in read_weights(model).values()} == {torch.bfloat16}


def test_the_mixture_is_made_of_the_dense_model_and_nothing_is_repeated(tmp_path):
    settings = compose(
        ["instances=40", "distill.steps=20", "draft.steps=4", "shape.experts=4", "shape.intermediate=64"],
        MoeSettings,
    )
    path = make_moe(settings, tmp_path)
    config = read_config(path)
    assert has_mtp(config) and config["model_type"] == "glm4_moe" and config["n_routed_experts"] == 4
    assert len(AutoTokenizer.from_pretrained(path)) <= config["vocab_size"]
    check_weights(read_weights(path), read_architecture(config).weight_shapes(mtp=True), frozenset())
    ids = torch.arange(2, 60)[None]
    dense = AutoModelForCausalLM.from_pretrained(shipped("models/tiny"))(ids).logits.softmax(-1)
    mixture = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits.softmax(-1)
    assert torch.minimum(dense, mixture).sum(-1).mean() > 0.7  # with routers of another model: 0.3

    before = read_weights(path)
    (tmp_path / "draft.pt").unlink()
    make_moe(settings, tmp_path)
    after = read_weights(path)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("override", ["shape.per_token=9", "distil.steps=4", "balance=some"])
def test_settings_of_the_mixture_that_are_unknown_or_impossible_are_refused(override):
    with pytest.raises(ValueError, match=override.split("=")[0].split(".")[-1]):
        compose([override], MoeSettings)
