"""Settings of the decoupled actor: what is refused, and what it takes over from the policy's."""

from __future__ import annotations

import json
import shutil

import pytest

from rlpipe.config.algo import AlgoConfig, Correction, MaskRule, Proximal
from rlpipe.config.decoupled import DecoupledConfig
from rlpipe.config.paths import shipped
from rlpipe.config.run import Config, Task
from rlpipe.config.trainer import TrainerConfig
from rlpipe.preflight.settings import check

pytestmark = pytest.mark.unit


@pytest.fixture
def actor(tmp_path):
    """A copy of the shipped actor's config and tokenizer, to break."""
    path = tmp_path / "actor"
    shutil.copytree(shipped("models/tiny_actor"), path, ignore=shutil.ignore_patterns("*.safetensors"))
    return path


def run_of(actor, tmp_path, **settings):
    config = Config(decoupled=DecoupledConfig(path=str(actor)), **settings)
    config.run.dir = str(tmp_path / "run")
    return config


def rewrite(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def refused(config):
    with pytest.raises(ValueError) as error:
        check(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correction": "obrs"}, ["decoupled.correction=obrs", "algo.correction"]),
        ({"distill_coef": -1.0}, ["decoupled.distill_coef", "-1.0"]),
        ({"lr": 1e-5, "min_lr": 1e-4}, ["min_lr=0.0001", "lr=1e-05"]),
        ({"correction_threshold": 0.0}, ["decoupled.correction_threshold"]),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        DecoupledConfig(**settings)
    assert all(word in str(error.value) for word in words)


def test_the_shipped_actor_passes(actor, tmp_path):
    check(run_of(actor, tmp_path))
    assert run_of(actor, tmp_path).rollout_model == str(actor)
    assert Config().rollout_model == Config().model.path


def test_a_path_without_a_checkpoint_names_the_setting(tmp_path):
    message = refused(run_of(tmp_path, tmp_path))
    assert f"decoupled.path='{tmp_path}'" in message and "config.json does not exist" in message


def test_another_vocabulary_is_refused(actor, tmp_path):
    rewrite(actor / "config.json", lambda content: content.update(vocab_size=801))
    message = refused(run_of(actor, tmp_path))
    assert "801" in message and "800" in message and "model.path" in message


def test_another_tokenizer_is_refused_and_another_spelling_of_the_same_is_not(actor, tmp_path):
    file = actor / "tokenizer.json"
    rewrite(file, lambda content: content.update(truncation={"max_length": 8}))
    check(run_of(actor, tmp_path))

    def swap(content):
        vocab = content["model"]["vocab"]
        one, two = list(vocab)[-2:]
        vocab[one], vocab[two] = vocab[two], vocab[one]

    rewrite(file, swap)
    assert "tokenizer.json differs" in refused(run_of(actor, tmp_path))
    file.unlink()
    assert "none of tokenizer.json" in refused(run_of(actor, tmp_path))


def test_speculation_asks_for_the_mtp_layer_of_the_actor(actor, tmp_path):
    rewrite(actor / "config.json", lambda content: content.pop("num_nextn_predict_layers"))
    message = refused(run_of(actor, tmp_path))
    assert str(actor) in message and "spec.mode=none" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.trainer, "tp", 8), ["decoupled.path", "num_attention_heads"]),
        (lambda c: setattr(c.rollout, "temperature", 0.0), ["rollout.temperature"]),
        (lambda c: setattr(c, "task", Task.MTP_ADAPT), ["task=mtp_adapt", "decoupled.path"]),
    ],
)
def test_settings_that_do_not_fit_an_actor_are_refused(actor, tmp_path, change, words):
    config = run_of(actor, tmp_path)
    change(config)
    message = refused(config)
    assert all(word in message for word in words), message


def test_the_actor_keeps_its_own_optimizer_and_correction_and_takes_the_rest():
    policy = AlgoConfig(
        correction=Correction.OBRS, proximal=Proximal.CURRENT, ppo_epochs=3, clip_low=0.1, kl_coef=0.1,
        entropy_coef=0.2, mask=MaskRule.TOKEN_K3, mask_high=2.0,
    )  # fmt: skip
    config = DecoupledConfig(lr=3e-4, clip_grad=0.5)
    algo, trainer = config.algo(policy), config.trainer(TrainerConfig(lr=1e-6, beta2=0.9))
    assert (algo.correction, algo.proximal, algo.mask) == ("tis_token", "start", "none")
    assert (algo.ppo_epochs, algo.clip_low, algo.kl_coef, algo.entropy_coef) == (3, 0.1, 0.0, 0.0)
    assert (trainer.lr, trainer.clip_grad, trainer.beta2) == (3e-4, 0.5, 0.9)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (3, [0, 3, 6, 7]), (10, [0, 7])])
def test_the_policy_is_validated_where_the_loop_validates(every, steps):
    config = Config()
    config.run.steps, config.val.every = 7, every
    assert [step for step in range(8) if config.validates(step)] == steps
