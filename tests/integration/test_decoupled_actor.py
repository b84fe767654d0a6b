"""A smaller actor that generates for a policy: both trained from the same batch, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.config.algo import AlgoConfig, Correction, ObrsConfig
from rlpipe.config.decoupled import DecoupledConfig, DistillKl
from rlpipe.config.draft import DraftConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.trainer.decoupled import DecoupledTrainer
from rlpipe.trainer.megatron import MegatronTrainer
from tests.helpers.candidates import policy_logprobs, tell_candidates
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer, meet
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

VOCAB = 61  # tensor parallelism has to pad it
OBRS = AlgoConfig(correction=Correction.OBRS, obrs=ObrsConfig(top_k=8), skip_zero_advantage=False)
ADAPT = DecoupledConfig(path="x", lr=1e-2)
ONLY_DISTILLED = replace(ADAPT, ppo_coef=0.0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Policy and actor: other layers, another width, the same vocabulary; the actor has no MTP layer."""
    top = tmp_path_factory.mktemp("decoupled")
    policy = write_random_checkpoint(top / "policy", vocab=VOCAB, head_scale=0.5)
    small = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2}
    actor = write_random_checkpoint(top / "actor", "qwen2", vocab=VOCAB, head_scale=0.7, seed=1, **small)
    return policy, actor


@pytest.fixture(scope="module")
def models(paths):
    return [AutoModelForCausalLM.from_pretrained(path) for path in paths]


def rollouts(actor, seed=0, temperature=1.0):
    """Groups that the actor sampled, with its candidates."""
    groups = make_groups(seed, vocab=VOCAB, common=5)
    with torch.no_grad():
        tell_candidates(groups, 8, lambda t: policy_logprobs(actor, t, temperature))
    return groups


def make_pair(paths, config=ADAPT, algo=OBRS, trainer=None, **where):
    """A policy and its actor, as a trainer rank builds them."""
    settings = trainer or TrainerConfig(lr=1e-2)
    policy = make_trainer(paths[0], settings, algo, **where)
    own = config.algo(algo)
    where.pop("master", None)
    actor = MegatronTrainer(
        config.trainer(settings),
        own,
        DraftConfig(),
        model_path=paths[1],
        total_steps=10,
        host=policy,
        **where,
    )
    return DecoupledTrainer(policy, actor, config=config, algo=own)


def figures(metrics):
    """Values without clocks."""
    return {name: v.value() for name, v in metrics.items() if not name.startswith("timing_s")}


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.export_weights().items()}


def hand_divergences(models, groups, temperature=1.0):
    """KL(p || q) and KL(q || p) at every sampled token, by transformers; the actor's logits have a graph."""
    both = []
    for t in (t for group in groups for t in group.trajectories):
        log_p, log_q = (policy_logprobs(model, t, temperature) for model in models)
        places = torch.tensor(t.loss_mask.tolist()) > 0
        log_p, log_q = log_p[places].detach(), log_q[places]
        forward = (log_p.exp() * (log_p - log_q)).sum(-1)
        both.append(torch.stack([forward, (log_q.exp() * (log_q - log_p)).sum(-1)]))
    return torch.cat(both, 1)


@pytest.mark.parametrize("kind", DistillKl)
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_distillation_alone_has_the_gradient_of_the_mean_divergence(paths, models, kind, temperature):
    groups = rollouts(models[1], temperature=temperature)
    models[1].zero_grad()
    divergences = hand_divergences(models, groups, temperature)
    means = divergences.mean(1)
    means[list(DistillKl).index(kind)].backward()
    norm = torch.stack([p.grad.square().sum() for p in models[1].parameters()]).sum().sqrt().item()
    trainer = make_pair(paths, replace(ONLY_DISTILLED, distill_kl=kind, distill_coef=0.5))
    told = figures(trainer.train_step(make_batch(groups, OBRS, temperature=temperature)))
    trainer.close()
    assert told["decoupled/kl"] == pytest.approx(means[0].item(), rel=1e-4) and means[0] > 0.1
    assert told["decoupled/reverse_kl"] == pytest.approx(means[1].item(), rel=1e-4)
    chosen = {DistillKl.FORWARD: "kl", DistillKl.REVERSE: "reverse_kl"}[kind]
    assert told["decoupled/distill_loss"] == pytest.approx(told[f"decoupled/{chosen}"], rel=1e-5)
    assert told["decoupled/grad_norm"] == pytest.approx(norm / 2, rel=1e-4)


def test_the_loss_of_the_actor_is_the_weighted_sum_of_ppo_and_distillation(paths, models):
    """By hand: -A log q / tokens (its own tokens: ratio and weight are 1), and the mean KL."""
    groups = rollouts(models[1])
    tokens = sum(t.response_length for group in groups for t in group.trajectories)
    models[1].zero_grad()
    loss = 0.7 * hand_divergences(models, groups)[0].mean()
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            log_q = policy_logprobs(models[1], t)
            own = [
                log_q[place, t.token_ids[place]]
                for place, sampled in enumerate(t.loss_mask.tolist())
                if sampled
            ]
            loss = loss - 0.3 * advantage * torch.stack(own).sum() / tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in models[1].parameters()]).sum().sqrt().item()
    trainer = make_pair(paths, replace(ADAPT, ppo_coef=0.3, distill_coef=0.7))
    told = figures(trainer.train_step(make_batch(groups, OBRS)))
    trainer.close()
    assert told["decoupled/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert told["decoupled/rollout_probs_diff_max"] < 1e-5, "the tokens are the actor's own"
    assert told["training/rollout_probs_diff_max"] > 0.05, "and not the policy's"


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_policy_learns_bit_for_bit_the_same_whether_or_not_an_actor_is_trained_beside_it(
    paths, models, epochs
):
    algo = replace(OBRS, ppo_epochs=epochs, minibatches=2)
    batches = [make_batch(rollouts(models[1], seed), algo) for seed in range(2)]
    alone = make_trainer(paths[0], algo=algo)
    expected = [figures(alone.train_step(batch)) for batch in batches]
    end = weights(alone)
    alone.close()
    pair = make_pair(paths, algo=algo)
    before, told = weights(pair.actor), [figures(pair.train_step(batch)) for batch in batches]
    assert [{name: step[name] for name in expected[0]} for step in told] == expected
    assert 0.2 < expected[0]["rollout_corr/obrs_acceptance"] < 0.95
    after = weights(pair.policy)
    assert after.keys() == end.keys() and all(torch.equal(after[name], end[name]) for name in end)
    moved = weights(pair.actor)
    assert not torch.equal(moved["lm_head.weight"], before["lm_head.weight"])
    pair.close()


def test_the_actor_is_distilled_from_the_policy_of_the_same_update(paths, models):
    """In the second of two updates on the same tokens the teacher is the policy after the first."""
    algo = replace(OBRS, ppo_epochs=2)
    groups = rollouts(models[1])
    frozen = replace(ADAPT, ppo_coef=0.0, distill_coef=0.0)
    once, twice = (replace(algo, ppo_epochs=epochs) for epochs in (1, 2))
    trainer = make_pair(paths, frozen, twice)
    both = trainer.train_step(make_batch(groups, twice))["decoupled/kl"].value()
    trainer.close()
    trainer = make_pair(paths, frozen, once)
    steps = [trainer.train_step(make_batch(groups, once))["decoupled/kl"].value() for _ in range(2)]
    trainer.close()
    assert both == pytest.approx(sum(steps) / 2, rel=1e-6) and abs(steps[1] - steps[0]) > 1e-4


def test_distillation_alone_brings_the_actor_to_the_policy(paths, models):
    pair = make_pair(paths, ONLY_DISTILLED, trainer=TrainerConfig(lr=0.0))
    batch = make_batch(rollouts(models[1]), OBRS)
    steps = [figures(pair.train_step(batch)) for _ in range(12)]
    pair.close()
    kl = [step["decoupled/kl"] for step in steps]
    assert kl[-1] < 0.6 * kl[0] and steps[-1]["decoupled/overlap"] > steps[0]["decoupled/overlap"]


def test_one_pass_of_each_model_makes_an_update(paths, models):
    batch, calls = make_batch(rollouts(models[1]), OBRS), {"policy": 0, "actor": 0}
    pair = make_pair(paths)
    for name in calls:

        def count(*_, name=name):
            calls[name] += 1

        getattr(pair, name).model.decoder.register_forward_hook(count)
    pair.train_step(batch)
    pair.close()
    assert calls == dict.fromkeys(calls, len(batch.minibatches[0].shards[0])) and calls["policy"] > 1


def test_a_resumed_pair_equals_the_uninterrupted_one(paths, models, tmp_path):
    first, second = (make_batch(rollouts(models[1], seed), OBRS) for seed in range(2))
    pair = make_pair(paths)
    pair.train_step(first)
    parts = pair.begin_save(tmp_path / "trainer", tmp_path / "hf")
    expected = figures(pair.train_step(second))
    ends = weights(pair.policy), weights(pair.actor)
    for stage in ("write", "finish"):
        for part in parts:
            getattr(part, stage)()
    pair.close()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "actor_hf").config.hidden_size == 16
    pair = make_pair(paths)
    pair.load(tmp_path / "trainer")
    assert pair.policy_version == pair.actor.policy_version == 1
    assert figures(pair.train_step(second)) == expected
    for end, trainer in zip(ends, (pair.policy, pair.actor), strict=True):
        now = weights(trainer)
        assert all(torch.equal(now[name], end[name]) for name in end)
    pair.close()


def steps_of_a_rank(rank, world_size, folder, paths, trainers):
    """In every rank, for each size: two updates of both models on its batches."""
    torch.set_num_threads(1)
    where, told = {"rank": rank, "world_size": world_size}, []
    for trainer, batches in trainers:
        if world_size > 1:
            where["master"] = meet(
                rank, world_size, folder / f"address_{trainer.tp}_{trainer.dp}_{trainer.pp}"
            )
        pair = make_pair(paths, trainer=trainer, **where)
        told.append([figures(pair.train_step(batch)) for batch in batches])
        pair.close()
    return told


def test_two_ranks_take_the_steps_of_one_whatever_they_share(paths, models, tmp_path):
    groups, alone = [rollouts(models[1], seed) for seed in range(2)], TrainerConfig(lr=1e-2)

    def work(trainer):
        return trainer, [make_batch(g, OBRS, trainer.dp) for g in groups]

    deeper = write_random_checkpoint(tmp_path / "actor", "qwen2", vocab=VOCAB, seed=1)  # a layer each stage
    paths = paths[0], deeper
    [mine] = steps_of_a_rank(0, 1, tmp_path, paths, [work(alone)])
    sizes = [work(replace(alone, **{axis: 2})) for axis in ("tp", "dp", "pp")]
    for others in run_ranks(steps_of_a_rank, 2, tmp_path, paths, sizes):
        for other in others:
            for one, two in zip(mine, other, strict=True):
                assert two == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in one.items()}
