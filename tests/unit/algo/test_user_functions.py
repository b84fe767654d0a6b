"""Advantages and losses in a user's file: equal to built-in ones they copy, refused when they are none."""

from __future__ import annotations

import dataclasses
import pickle
import sys

import numpy as np
import pytest
import torch

from rlpipe.algo.advantage import compute_advantages
from rlpipe.algo.policy_loss import LossInputs, LossTotals, check_names, micro_batch_loss
from rlpipe.config.algo import AlgoConfig, Correction, LossAgg
from rlpipe.metrics.names import declared
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.unit

SOURCE = """
import torch
from helper import EPSILON

def grpo(token_level_rewards, response_mask, index):
    rewards = token_level_rewards.sum(-1)
    result = torch.zeros_like(rewards)
    for group in set(index):
        rows = torch.tensor(index == group)
        result[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + EPSILON)
    return result[:, None] * response_mask

def like_verl(token_level_rewards, response_mask, index, **options):
    advantages = grpo(token_level_rewards, response_mask, index)
    return advantages, advantages

def per_answer(token_level_rewards): return token_level_rewards.sum(-1)
def no_epsilon(token_level_rewards, response_mask, index):
    rewards = token_level_rewards.sum(-1)
    parts = [rewards[[i for i, g in enumerate(index) if g == group]] for group in ("a:0", "b:1")] if 0 else [
        rewards[:2], rewards[2:]]
    return torch.cat([(p - p.mean()) / p.std() for p in parts])[:, None] * response_mask
def values_too(token_level_rewards, values): ...
def raises(response_mask):
    return response_mask["x"]
def returns_none(response_mask): return None

def ratio(log_prob, old_log_prob): return (log_prob - old_log_prob).exp()
def losses(log_prob, old_log_prob, advantages, response_mask):
    r = ratio(log_prob, old_log_prob)
    clipped = r.clamp(1 - 0.2, 1 + 0.2)
    loss = torch.maximum(-advantages * r, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(-3.0 * advantages, loss), loss)

def with_metrics(log_prob, advantages): return -advantages * log_prob, {"actor/mine": 3.0}

def aggregated(log_prob, old_log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
    from verl.trainer.ppo.core_algos import agg_loss
    grid = losses(log_prob, old_log_prob, advantages, response_mask)
    if rollout_is_weights is not None:
        grid = grid * rollout_is_weights
    return agg_loss(grid, response_mask, loss_agg_mode, **config.global_batch_info), {}

def own_mean(log_prob, advantages, rollout_is_weights): return -(advantages * log_prob).mean()
def no_weights(log_prob, advantages): return -(advantages * log_prob).sum()
def detached(log_prob, advantages): return -advantages * log_prob.detach()
def constant(log_prob): return log_prob * 0
def beyond(log_prob, response_mask, config, rollout_is_weights):
    return -log_prob.sum() / config.global_batch_info["batch_num_tokens"]
def root(log_prob, response_mask): return (log_prob - log_prob.detach()).abs().sqrt()
def infinite(log_prob): return log_prob / 0
def words(log_prob): return "loss"
def values_again(log_prob, values): ...
def loss_raises(log_prob):
    return log_prob.nothing
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text("EPSILON = 1e-6")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    # Another test's file of that name would not be read.
    for name in ("mine", "helper"):
        sys.modules.pop(name, None)


def groups_with_rewards(*rewards):
    groups = make_groups(groups=len(rewards), siblings=len(rewards[0]))
    for group, values in zip(groups, rewards, strict=True):
        for trajectory, reward in zip(group.trajectories, values, strict=True):
            trajectory.reward = reward
    return groups


@pytest.mark.parametrize("name", ["mine.py:grpo", "mine:grpo", "mine.py:like_verl"])
def test_an_advantage_written_outside_equals_the_built_in_one(name, monkeypatch):
    config = AlgoConfig(advantage=name)
    check_names(config)
    # A worker of another folder gets the settings by pickle.
    config = pickle.loads(pickle.dumps(config))
    if ".py" in name:
        monkeypatch.chdir("/")
    groups = groups_with_rewards([1.0, 0.0, 0.0], [2.0, 2.0, 5.0])
    built_in = compute_advantages(groups, AlgoConfig())
    assert any(values.any() for values in built_in)
    for values, expected in zip(compute_advantages(groups, config), built_in, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-5)


def inputs():
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(4, 7, generator=generator) > 0.3).float()
    mask[:, 0] = 1
    grids = {
        name: -3 * torch.rand(4, 7, generator=generator) * mask
        for name in ("logprobs", "entropies", "old_logprobs", "rollout_logprobs", "advantages")
    }
    grids["advantages"] = (grids["advantages"] + 1.5) * mask
    grids["logprobs"].requires_grad_()
    return LossInputs(**grids, mask=mask, reference_logprobs=None)


def gradient(config, batch):
    totals = LossTotals(tokens=40.0, sequences=9.0, dp_size=2)
    loss, metrics = micro_batch_loss(batch, totals, config)
    loss.backward()
    return loss.item(), batch.logprobs.grad, metrics


@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-sum", "token-sum"])
@pytest.mark.parametrize("name", ["losses", "aggregated"])
def test_a_clipped_loss_written_outside_equals_the_built_in_one_with_its_weights(name, loss_agg):
    config = AlgoConfig(policy_loss=f"mine.py:{name}", loss_agg=LossAgg(loss_agg))
    check_names(config)
    value, grad, _ = gradient(config, inputs())
    expected, expected_grad, _ = gradient(AlgoConfig(loss_agg=LossAgg(loss_agg)), inputs())
    assert value == pytest.approx(expected, rel=1e-5) and expected_grad.any()
    torch.testing.assert_close(grad, expected_grad)


def test_the_numbers_of_a_loss_become_declared_metrics():
    config = AlgoConfig(policy_loss="mine.py:with_metrics")
    check_names(config)
    metrics = gradient(config, inputs())[2]
    assert metrics["actor/user/mine"].value() == pytest.approx(3.0)
    declared("actor/user/mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "per_answer",
            r"returned \(4,\), not a tensor of shape \(4, 3\).*values\[:, None\] \* response_mask",
        ),
        ("no_epsilon", r"not finite: keep divisors above 0"),
        ("values_too", "needs values, but rlpipe passes token_level_rewards"),
        ("raises", r"mine\.py:25: algo\.advantage=.* raised .*on a batch of four answers"),
        ("returns_none", "returned a NoneType"),
        ("grppo", r"mine\.py has no 'grppo'\. Did you mean grpo\?"),
    ],
)
def test_an_advantage_that_breaks_the_contract_is_refused_at_launch(name, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_names(AlgoConfig(advantage=f"mine.py:{name}"))
    assert "algo.advantage=" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_mean", "does not divide by the totals of the batch.*agg_loss"),
        ("no_weights", "algo.correction=tis_token would have no effect"),
        ("detached", "without a gradient"),
        ("constant", "the gradient 0 on log_prob"),
        ("beyond", "a gradient on tokens where response_mask is 0"),
        ("root", "a gradient that is not finite"),
        ("infinite", "values that are not finite"),
        ("words", "returned a str"),
        ("values_again", "needs values, but rlpipe passes old_log_prob"),
        ("loss_raises", r"mine\.py:\d+: algo\.policy_loss=.* raised AttributeError"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused_at_launch(name, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_names(AlgoConfig(policy_loss=f"mine.py:{name}"))
    assert "algo.policy_loss=" in str(refused.value)


def test_a_loss_without_weights_is_accepted_where_no_correction_weighs():
    config = AlgoConfig(
        policy_loss="mine.py:no_weights", correction=Correction.NONE, loss_agg=LossAgg.TOKEN_SUM
    )
    check_names(config)
    check_names(dataclasses.replace(config, policy_loss="vanilla"))


def test_a_file_that_was_edited_counts_from_the_next_launch(folder):
    config = AlgoConfig(advantage="mine.py:grpo")
    check_names(config)
    (folder / "mine.py").write_text("def grpo(response_mask): return response_mask.nothing")
    compute_advantages(groups_with_rewards([1.0, 0.0]), config)
    with pytest.raises(ValueError, match="raised AttributeError"):
        check_names(config)
