"""The trainer on a CUDA device: the same numbers as on the CPU, with every layer implementation there."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.trainer import LayerSpec, Precision, TrainerConfig
from rlpipe.models.checkpoint import read_weights
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, make_batch, make_trainer, train
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.gpu

LAYERS = [LayerSpec.LOCAL] + [LayerSpec.TE] * (importlib.util.find_spec("transformer_engine") is not None)
CONFIG = TrainerConfig(lr=1e-2)
ALGO = AlgoConfig(kl_coef=0.1)


def train_without_gpu(rank, world_size, folder, runs):
    """`train` in a process that sees no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert not torch.cuda.is_available()
    return train(rank, world_size, folder, runs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("mimo"), hidden=64, head_dim=32)


@pytest.fixture(scope="module")
def on_cpu(checkpoint, tmp_path_factory):
    groups = [make_groups(seed, common=9) for seed in range(3)]
    run = Run(path=checkpoint, config=CONFIG, algo=ALGO, groups=groups)
    return run_ranks(train_without_gpu, 1, tmp_path_factory.mktemp("cpu"), {"run": run})[0]["run"]


@pytest.mark.parametrize("layers", LAYERS)
def test_logprobs_and_steps_equal_those_of_the_cpu(checkpoint, on_cpu, layers):
    trainer = make_trainer(checkpoint, replace(CONFIG, layers=layers), ALGO)
    weights = trainer.export_weights()
    assert all(torch.equal(w, weights[k]) for k, w in read_weights(checkpoint).items())
    share = trainer.shares_prefixes
    batches = [make_batch(make_groups(seed, common=9), ALGO, share=share) for seed in range(3)]
    for mine, theirs in zip(trainer.logprobs(batches[0]), on_cpu["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)
    for batch, expected in zip(batches, on_cpu["metrics"], strict=True):
        metrics = trainer.train_step(batch)
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"):
            assert metrics[name].value() == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    trainer.close()


@pytest.mark.parametrize("layers", LAYERS)
def test_bfloat16_follows_float32_within_its_precision(checkpoint, on_cpu, layers):
    config = replace(CONFIG, layers=layers, precision=Precision.BF16)
    trainer = make_trainer(checkpoint, config, ALGO)
    batch = make_batch(make_groups(0, common=9), ALGO, share=trainer.shares_prefixes)
    metrics = trainer.train_step(batch)
    trainer.close()
    expected = on_cpu["metrics"][0]
    assert metrics["actor/grad_norm"].value() == pytest.approx(expected["actor/grad_norm"], rel=0.1)
    assert metrics["actor/entropy"].value() == pytest.approx(expected["actor/entropy"], rel=0.02)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("layers", LAYERS)
def test_a_resumed_run_equals_an_uninterrupted_one(checkpoint, tmp_path, layers, precision):
    config = replace(CONFIG, layers=layers, precision=precision)
    local = layers is LayerSpec.LOCAL
    batches = [make_batch(make_groups(seed, common=9), ALGO, share=local) for seed in range(4)]
    norms = []
    for resumed in (False, True):
        trainer = make_trainer(checkpoint, config, ALGO)
        if resumed:
            trainer.load(tmp_path / "checkpoint")
        else:
            trainer.train_step(batches[0])
            trainer.save(tmp_path / "checkpoint")
        norms.append([trainer.train_step(batch)["actor/grad_norm"].value() for batch in batches[1:]])
        trainer.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
