"""A correction from outside the package: equal to the built-in one it copies, refused when it is none."""

from __future__ import annotations

import sys

import pytest
import torch

from rlpipe.algo.correction import correct, make_rule
from rlpipe.algo.policy_loss import check_names
from rlpipe.algo.user_correction import SETTING
from rlpipe.config.algo import AlgoConfig
from rlpipe.metrics.names import declared

pytestmark = pytest.mark.unit

MASK = torch.tensor([[1.0, 1, 1], [1, 0, 1]])
ROLLOUT = torch.tensor([[0.2, 0.5, 0.4], [0.5, 1.0, 0.1]]).log()
TRAINER = torch.tensor([[0.4, 0.5, 0.1], [0.25, 1.0, 0.8]]).log()
SOURCE = """
import torch
from rlpipe.algo.rule import TokenWeights

def truncated(inputs):
    return TokenWeights(weights=inputs.ratio.clamp(max=inputs.threshold), mask=inputs.mask)

def halved(inputs):
    kept = inputs.mask * (inputs.ratio > 0.4)
    return TokenWeights(weights=None, mask=kept, metrics={"mine": 7.0})

def shape(inputs): return TokenWeights(weights=inputs.ratio[:1], mask=inputs.mask)
def graph(inputs): return TokenWeights(weights=inputs.ratio.clone().requires_grad_(), mask=inputs.mask)
def negative(inputs): return TokenWeights(weights=-inputs.ratio, mask=inputs.mask)
def infinite(inputs): return TokenWeights(weights=inputs.ratio / 0, mask=inputs.mask)
def invented(inputs): return TokenWeights(weights=None, mask=torch.ones_like(inputs.mask))
def pair(inputs): return inputs.ratio, inputs.mask
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "correction_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("correction_of_mine", None)


def corrected(name):
    config = AlgoConfig(correction="user", user_correction=f"correction_of_mine:{name}")
    check_names(config)
    return run(config)


def run(config):
    return correct(
        current_logprobs=TRAINER,
        trainer_logprobs=TRAINER,
        rollout_logprobs=ROLLOUT,
        mask=MASK,
        config=config,
        rule=make_rule(config),
    )


def test_truncated_importance_sampling_written_outside_equals_the_built_in_one():
    own, built_in = corrected("truncated"), run(AlgoConfig(correction="tis_token"))
    assert torch.equal(own.mask, built_in.mask)
    assert torch.allclose(own.weights, built_in.weights)


def test_rejected_tokens_leave_the_mask_and_the_metrics_are_declared():
    own = corrected("halved")
    assert own.weights is None
    assert own.mask.tolist() == [[1, 1, 0], [1, 0, 1]]
    values = {name: value.value() for name, value in own.metrics.items()}
    assert values["rollout_corr/mine"] == 7.0
    assert values["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    for name in own.metrics:
        declared(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shape", r"weights of shape \(1, 3\), not \(2, 3\)"),
        ("graph", "weights with a graph"),
        ("negative", "negative or not finite"),
        ("infinite", "negative or not finite"),
        ("invented", "a mask that is not made"),
        ("pair", "returned a tuple"),
        ("nothing", "has no .nothing.. It defines"),
    ],
)
def test_a_function_that_breaks_the_contract_is_refused(name, says):
    with pytest.raises(ValueError, match=f"{SETTING}='correction_of_mine:{name}'.*{says}"):
        corrected(name)


@pytest.mark.parametrize("settings", [{"correction": "user"}, {"user_correction": "a:b"}])
def test_the_function_and_the_choice_go_together(settings):
    with pytest.raises(ValueError, match=r"needs both algo\.correction=user"):
        AlgoConfig(**settings)
