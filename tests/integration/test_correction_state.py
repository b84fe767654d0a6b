"""A correction with a memory, from outside the package: what it declares reaches it, its state is resumed."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.algo.correction import top_logprobs
from rlpipe.config.algo import AlgoConfig
from tests.helpers.candidates import noisy, policy_logprobs, tell_candidates
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

VOCAB = 61
SOURCE = """
import numpy as np
from rlpipe.algo.rule import CorrectionRule, TokenWeights


class Centred(CorrectionRule):
    \"\"\"Weights ratio / running mean of the ratio; the running mean also sees columns and candidates.\"\"\"

    mean = 1.0

    def top_logprobs(self, vocab_size):
        return min(4, vocab_size)

    def columns(self, trajectory, seed):
        return {"place": np.arange(len(trajectory.token_ids), dtype=np.float32)}

    def weigh(self, inputs):
        mask = inputs.mask.bool()
        extras = inputs.extras
        tokens = int(mask.sum())
        assert extras.columns["place"].shape == (tokens,) and (extras.columns["place"] > 0).all()
        assert extras.rollout_top.shape == extras.target_top.shape == (tokens, 4)
        gap = (extras.target_top.exp() - extras.rollout_top.exp()).abs().mean().item()
        ratio = inputs.ratio[mask].mean().item()
        return TokenWeights(
            weights=inputs.ratio / self.mean * inputs.mask,
            mask=inputs.mask,
            metrics={"centre": ratio + gap, "mean_before": self.mean},
        )

    def observe(self, metrics):
        self.mean = 0.5 * self.mean + 0.5 * metrics["rollout_corr/centre"].value()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state.get("mean", 1.0)
"""


@pytest.fixture
def algo(tmp_path, monkeypatch):
    (tmp_path / "centred_rule.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield AlgoConfig(correction="user", user_correction="centred_rule:Centred")
    sys.modules.pop("centred_rule", None)


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path / "model", vocab=VOCAB, head_scale=0.5)


def batches(path, algo, count):
    model, work = AutoModelForCausalLM.from_pretrained(path), []
    for seed in range(count):
        groups = make_groups(seed, vocab=VOCAB)
        with torch.no_grad():
            tell_candidates(
                groups,
                top_logprobs(algo, VOCAB),
                lambda t: noisy(policy_logprobs(model, t, 1.0), 1.0, len(t.token_ids)),
            )
        work.append(make_batch(groups, algo, budget=40))
    return work


def run(trainer, work):
    steps = [{k: v.value() for k, v in trainer.train_step(batch).items()} for batch in work]
    return [{k: v for k, v in step.items() if not k.startswith("timing_s")} for step in steps]


def test_a_running_mean_is_resumed_bit_for_bit(path, algo, tmp_path):
    work = batches(path, algo, 5)
    trainer = make_trainer(path, algo=algo)
    run(trainer, work[:2])
    trainer.save(tmp_path / "checkpoint")
    state = trainer.rule.state_dict()
    uninterrupted, weights = run(trainer, work[2:]), trainer.export_weights()
    trainer.close()
    means = [step["rollout_corr/mean_before"] for step in uninterrupted]
    assert means[0] == pytest.approx(state["mean"]) and len(set(means)) == 3 and state["mean"] != 1

    trainer = make_trainer(path, algo=algo)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.rule.state_dict() == state
    assert run(trainer, work[2:]) == uninterrupted
    for name, weight in trainer.export_weights().items():
        assert torch.equal(weight, weights[name]), name
    trainer.close()


def test_a_checkpoint_of_another_correction_starts_with_an_empty_state(path, algo, tmp_path):
    trainer = make_trainer(path)
    trainer.save(tmp_path / "checkpoint")
    trainer.close()
    trainer = make_trainer(path, algo=algo)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.rule.state_dict() == {"mean": 1.0}
    trainer.close()
