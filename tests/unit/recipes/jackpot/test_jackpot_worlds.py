"""The worlds of Jackpot's tables: exact chances, rlpipe's losses in them, and figures of planted curves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from recipes.jackpot import worlds
from recipes.jackpot.worlds import GROUP, POSITIONS, PROMPTS, VOCAB, Model, World
from rlpipe.algo.correction import make_rule
from rlpipe.config.algo import AlgoConfig, ObrsConfig

pytestmark = pytest.mark.unit


@pytest.fixture
def world():
    return World(2)


def test_the_chance_of_a_right_answer_is_the_sum_over_all_answers(world):
    model = Model(world.base, None, world.generator)
    with torch.no_grad():
        model.weights[1].normal_(generator=world.generator)  # later tokens depend on earlier ones
    answers = torch.cartesian_prod(*[torch.arange(VOCAB)] * POSITIONS)[None].expand(2, -1, -1)
    right = torch.ones(answers.shape[:2])
    for position in range(POSITIONS):
        before = torch.full_like(answers[..., 0], VOCAB) if position == 0 else answers[..., position - 1]
        rows = torch.full_like(before, 3 * POSITIONS + position)
        log_p = model.logprobs(rows, before).detach()
        chosen = answers[..., position]
        right *= log_p.exp().gather(-1, chosen[..., None])[..., 0]
        right *= world.right[:, 3, position].float().gather(-1, chosen)
    torch.testing.assert_close(world.chance(model)[:, 3], right.sum(-1))


def gradient(world, correction, *, batch, model, proximal="start"):
    config = AlgoConfig(correction=correction, proximal=proximal, obrs=ObrsConfig(**worlds.EXACT))
    old = model.logprobs(batch["rows"].flatten(1), batch["before"].flatten(1)).detach().view_as(batch["q"])
    loss, _, metrics = worlds.learn(model, batch, config, make_rule(config), old=old)
    return torch.autograd.grad(loss, model.weights[0])[0], metrics


def test_corrections_change_nothing_where_the_policy_samples_itself(world):
    model = Model(world.base, None, world.generator)
    batch = world.play(model, model.copied())
    plain, _ = gradient(world, "none", batch=batch, model=model)
    assert plain.abs().max() > 1e-3
    for correction in ("tis_token", "obrs", "obrs_mask", "obrs_weight"):
        found, _ = gradient(world, correction, batch=batch, model=model)
        torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-4)


def test_each_world_has_the_loss_that_it_has_alone(world):
    """The worlds share a tensor, not a gradient: rewards of one leave the weights of the other alone."""
    model = Model(world.base, None, world.generator)
    batch = world.play(model, model.copied())
    batch["advantages"][1] = 0
    both, _ = gradient(world, "none", batch=batch, model=model)
    assert both[0].abs().max() > 1e-3 and both[1].abs().max() == 0

    # By hand: minus the mean over tokens of A log p.
    log_p = model.logprobs(batch["rows"].flatten(1), batch["before"].flatten(1)).view_as(batch["q"])
    chosen = log_p.gather(-1, batch["tokens"][..., None])[0, ..., 0]
    loss = -(batch["advantages"][0, :, None] * chosen).sum() / (PROMPTS * GROUP * POSITIONS)
    torch.testing.assert_close(torch.autograd.grad(loss, model.weights[0])[0], both, atol=1e-7, rtol=1e-4)


def test_fp8_rounds_the_weights_of_the_rollout_and_obrs_sees_it(world):
    model = Model(world.base, None, world.generator)
    rounded = model.copied(fp8=True)
    error = (rounded[0] - model.weights[0]).abs().max().item()
    assert 0 < error <= model.weights[0].abs().max().item() / 16
    _, metrics = gradient(world, "obrs", batch=world.play(model, rounded), model=model)
    assert 0.9 < metrics["rollout_corr/obrs_acceptance"].value() < 1


def test_few_candidates_underestimate_the_normaliser_and_all_of_them_do_not(world):
    model = Model(world.base, None, world.generator)
    actor = Model(world.base, 6, world.generator)
    batch = world.play(actor, actor.copied())
    ratios = []
    for settings in (worlds.TOP_K | {"top_k": 2}, worlds.TOP_K | {"top_k": 10}, worlds.EXACT):
        config = AlgoConfig(correction="obrs", obrs=ObrsConfig(**settings))
        _, _, metrics = worlds.learn(model, batch, config, make_rule(config), old=batch["q"])
        ratios.append(metrics["rollout_corr/obrs_z_ratio"].value())
    assert ratios[0] < ratios[1] - 0.1 < 0.9 and ratios[2] == pytest.approx(1, abs=1e-5)


def test_arms_learn_and_an_actor_that_is_distilled_stays_closer():
    short = {name: replace(arm, steps=60) for name, arm in worlds.pair(6).items()}
    policy = worlds.summary(worlds.train(short["on policy"], 3))
    assert min(policy["reward"]) > policy["reward over steps"][0] + 0.1
    with_kl, without = (worlds.summary(worlds.train(short[name], 3)) for name in ("Jackpot", "OBRS, no KL"))
    assert sum(with_kl["kl, last half"]) < sum(without["kl, last half"])


def test_differences_are_paired_by_world_and_pass_at_4_follows_from_the_chance():
    chances = [torch.tensor([[0.5, 0.1], [0.2, 0.0]]), torch.tensor([[0.6, 0.2], [0.3, 0.1]])]
    curve = {"step": [0, 1], "chance": chances, "kl": [torch.ones(2), torch.zeros(2)]}
    row = worlds.summary(curve | {"z_ratio": [None], "kappa": [None]})
    assert row["reward"] == pytest.approx([0.4, 0.2]) and row["kl, last half"] == [0.0, 0.0]
    assert row["pass@4"] == pytest.approx([1 - (0.4**4 + 0.8**4) / 2, 1 - (0.7**4 + 0.9**4) / 2], abs=1e-4)

    rows = {"a": row, "b": dict(row, reward=[0.3, 0.1])}
    worlds.compare(rows, "b")
    assert rows["a"]["minus b"] == pytest.approx([0.1, 0.1, 0.1])
    assert not any(math.isnan(x) for x in rows["a"]["mean"])
