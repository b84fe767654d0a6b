"""The worlds of Jackpot's tables: exact chances, rlpipe's losses in them, and figures of planted curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.jackpot import worlds
from recipes.jackpot.worlds import GROUP, POSITIONS, PROMPTS, VOCAB, Model, World
from recipes.runs import rounded_over_seeds, seeds_to_decide
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


def test_the_coin_masks_as_many_tokens_as_obrs_whichever_they_are(world):
    """Among tokens that OBRS masks always or never, the coin's share is that of all of them."""
    policy, actor = Model(world.base, None, world.generator), Model(world.base, 6, world.generator)
    batch = world.play(actor, actor.copied())
    config = AlgoConfig(correction="obrs_mask", obrs=ObrsConfig(**worlds.EXACT))
    masks = {}
    for name, rule in (("OBRS", make_rule(config)), ("coin", worlds.Coin(config))):
        weighed = []
        weigh = rule.weigh
        rule.weigh = lambda inputs, weigh=weigh, to=weighed: to.append(weigh(inputs)) or to[-1]
        worlds.learn(policy, batch, config, rule, old=batch["q"])
        masks[name] = weighed[0].mask.bool()

    flat = [batch[name].flatten(1) for name in ("rows", "before")]
    p = policy.logprobs(*flat).detach().view_as(batch["q"])
    ratio = (p - batch["q"]).gather(-1, batch["tokens"][..., None])[..., 0].flatten(0, 1).exp()
    share = {name: mask.float().mean().item() for name, mask in masks.items()}
    assert share["coin"] == pytest.approx(share["OBRS"], abs=0.05) and share["OBRS"] < 0.95
    assert masks["OBRS"][ratio >= 1].all() and not masks["coin"][ratio >= 1].all()
    assert masks["OBRS"][ratio < 0.5].float().mean() < masks["coin"][ratio < 0.5].float().mean() - 0.1


def test_noise_moves_the_weights_of_the_rollout_by_its_size(world):
    model = Model(world.base, None, world.generator)
    moved = model.noisy(0.5, world.generator)[0] - model.weights[0].detach()
    assert moved.std().item() == pytest.approx(0.5, rel=0.1)


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


@pytest.mark.parametrize(
    ("file", "arm", "other", "row"),
    [
        ("staleness", "16-obrs", "16-tis", "| TIS, 16 updates old | +.237 [-1.087, 1.560] | 22 | 9.8 |"),
        ("staleness", "16-obrs", "16-none", "| none, 16 updates old | +.502 [-.001, 1.005] | 4 | 2.2 |"),
        ("staleness", "16-obrs", "0-on_policy", "| on policy | -.168 [-.715, .378] | 10 | 9.2 |"),
        ("decoupled", "obrs", "tis", "| TIS, smaller actor | +.359 [-2.420, 3.139] | 6 | 0.9 |"),
        ("decoupled", "obrs", "on_policy", "| on policy, smaller actor | -.102 [-1.591, 1.387] | 13 | 1.6 |"),
    ],
)
def test_the_study_names_the_seeds_that_would_decide(file, arm, other, row):
    folder = Path(worlds.__file__).parent
    runs = json.loads((folder / f"{file}.json").read_text())["runs"]
    seeds = sorted({name.rsplit("-", 1)[1] for name in runs})
    after = {name: [runs[f"{name}-{seed}"]["after"] for seed in seeds] for name in (arm, other)}
    gaps = [a - b for a, b in zip(after[arm], after[other], strict=True)]
    needed = seeds_to_decide(gaps)
    seconds = sum(run["seconds"] for name, run in runs.items() if name.rsplit("-", 1)[0] in (arm, other))
    hours = needed * seconds / len(seeds) / 3600

    interval = "{:+.3f} [{:.3f}, {:.3f}]".format(*rounded_over_seeds(gaps)).replace("0.", ".")
    assert row.endswith(f"| {interval} | {needed} | {hours:.1f} |")
    assert row in (folder / "study.md").read_text()
