"""Tensor and data parallel trainers on gloo do what one process does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.trainer.runtime import free_address
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import train
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.integration

ALONE = TrainerConfig(lr=1e-2)
ALGO = AlgoConfig(kl_coef=0.1, entropy_coef=0.01, ppo_epochs=2)
SPLITS = {
    "tp": replace(ALONE, tp=2),
    "dp": replace(ALONE, dp=2),
    "dp_sharded": replace(ALONE, dp=2, distributed_optimizer=True),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every family trained alone and split, two batches each, from one launch of each world size."""
    folder = tmp_path_factory.mktemp("models")
    # 61 tokens: tensor parallelism has to pad the vocabulary
    models = {
        "mimo": write_random_checkpoint(folder / "mimo", "mimo", vocab=61),
        "qwen3": write_random_checkpoint(folder / "qwen3", "qwen3", vocab=64, tie=True),
    }
    groups = [make_groups(seed, vocab=61) for seed in (0, 1)]
    alone = {f"{model}/alone": (path, ALONE, ALGO, free_address()) for model, path in models.items()}
    split = {
        f"{model}/{split}": (path, config, ALGO, free_address())
        for model, path in models.items()
        for split, config in SPLITS.items()
    }
    told = run_ranks(train, 1, alone, groups)[0]
    ranks = run_ranks(train, 2, split, groups)
    return told | ranks[0], ranks


CASES = [(model, split) for model in ("mimo", "qwen3") for split in SPLITS]


@pytest.mark.parametrize(("model", "split"), CASES)
def test_gradient_norms_and_losses_equal_those_of_one_process(outcomes, model, split):
    told, _ = outcomes
    for alone, other in zip(told[f"{model}/alone"]["metrics"], told[f"{model}/{split}"]["metrics"], strict=True):
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/pg_clipfrac"):
            assert other[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
        assert other["perf/train_tokens"] == alone["perf/train_tokens"]
        assert other["rollout_corr/kl"] == pytest.approx(alone["rollout_corr/kl"], rel=1e-5)


@pytest.mark.parametrize(("model", "split"), CASES)
def test_weights_after_training_equal_those_of_one_process(outcomes, model, split):
    told, _ = outcomes
    alone, other = told[f"{model}/alone"]["weights"], told[f"{model}/{split}"]["weights"]
    assert other.keys() == alone.keys()
    for name, weight in alone.items():
        np.testing.assert_allclose(other[name], weight, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("model", "split"), CASES)
def test_logprobs_equal_those_of_one_process_on_every_rank(outcomes, model, split):
    told, ranks = outcomes
    for rank in ranks:
        for alone, other in zip(
            told[f"{model}/alone"]["logprobs"], rank[f"{model}/{split}"]["logprobs"], strict=True
        ):
            np.testing.assert_allclose(other, alone, atol=1e-4)


def test_only_rank_0_exports_weights_and_all_ranks_report_the_same_metrics(outcomes):
    _, ranks = outcomes
    for name in ranks[0]:
        assert ranks[0][name]["weights"] is not None and ranks[1][name]["weights"] is None
        for mine, theirs in zip(ranks[0][name]["metrics"], ranks[1][name]["metrics"], strict=True):
            timed = {"timing_s/update_actor"}
            assert {k: v for k, v in mine.items() if k not in timed} == {
                k: v for k, v in theirs.items() if k not in timed
            }
