"""OBRS in real trainer steps: rollouts that carry their distribution, judged in the pass made anyway."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.algo.obrs import token_uniforms
from rlpipe.config.algo import AlgoConfig, Correction, ObrsConfig, ObrsNormalizer, ObrsTarget, Proximal
from rlpipe.config.trainer import TrainerConfig
from tests.helpers.candidates import noisy, policy_logprobs, tell_candidates
from tests.helpers.cli import SMALL
from tests.helpers.cli import run as run_command
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, make_batch, make_trainer, train
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

VOCAB = 61  # tensor parallelism has to pad it
SAME = {"rel": 1e-4, "abs": 1e-6}
OBRS = AlgoConfig(correction=Correction.OBRS, obrs=ObrsConfig(top_k=8))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("obrs") / "model", vocab=VOCAB, head_scale=0.5)


@pytest.fixture(scope="module")
def model(path):
    return AutoModelForCausalLM.from_pretrained(path)


def rollouts(model, scale=1.0, count=8, common=0, seed=0, temperature=1.0):
    """Groups whose rollout is the policy with noise in its logits."""
    groups = make_groups(seed, vocab=VOCAB, common=common)
    with torch.no_grad():
        tell_candidates(
            groups, count, lambda t: noisy(policy_logprobs(model, t, temperature), scale, len(t.token_ids))
        )
    return groups


def exact(**settings):
    return replace(OBRS, obrs=ObrsConfig(normalizer=ObrsNormalizer.EXACT, **settings))


def step(trainer, batch):
    """Figures of one step, without its timing."""
    told = {name: value.value() for name, value in trainer.train_step(batch).items()}
    return {name: value for name, value in told.items() if not name.startswith("timing_s")}


def one_step(path, algo, batch):
    trainer = make_trainer(path, algo=algo)
    told = step(trainer, batch)
    trainer.close()
    return told


def passes(path, algo, groups):
    """Forward passes of the decoder in one training step."""
    trainer, calls = make_trainer(path, algo=algo), []
    trainer.model.decoder.register_forward_hook(lambda *_: calls.append(1))
    step(trainer, make_batch(groups, algo))
    trainer.close()
    return len(calls)


@pytest.mark.parametrize("proximal", [Proximal.START, Proximal.CURRENT])
@pytest.mark.parametrize("target", ObrsTarget)
@pytest.mark.parametrize("epochs", [1, 2])
def test_obrs_makes_no_forward_pass_that_no_correction_would_not_make(path, model, proximal, target, epochs):
    groups = rollouts(model)
    plain = AlgoConfig(correction=Correction.NONE, proximal=proximal, ppo_epochs=epochs)
    obrs = replace(plain, correction=Correction.OBRS, obrs=ObrsConfig(top_k=8, target=target))
    once = passes(path, replace(plain, ppo_epochs=1), groups)
    several = {Proximal.START: 3, Proximal.CURRENT: 2}[proximal] if epochs == 2 else 1
    assert passes(path, plain, groups) == passes(path, obrs, groups) == several * once > 0


@pytest.mark.parametrize(("lam", "temperature"), [(1.0, 1.0), (1.4, 0.8)])
def test_with_the_exact_normaliser_a_step_equals_a_hand_computation(path, model, lam, temperature):
    groups = rollouts(model, count=VOCAB, common=9, temperature=temperature)
    algo = exact(lam=lam, c1=1.3)
    model.zero_grad()
    tokens = sum(t.response_length for group in groups for t in group.trajectories)
    loss = accepted = kl_before = 0.0
    truncated = False
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            log_p = policy_logprobs(model, t, temperature)
            uniforms = token_uniforms(0, t.trajectory_id, len(t.token_ids))
            for place in (n for n, sampled in enumerate(t.loss_mask.tolist()) if sampled):
                token, p = t.token_ids[place], log_p[place].detach().exp()
                q = torch.zeros(VOCAB)
                for other, logprob in t.top_logprobs[place]:
                    q[other] = logprob
                q = q.exp()
                accept = min(1.0, (p[token] / (lam * q[token])).item())
                kl_before += (p * (p / q).log()).sum().item() / tokens
                if uniforms[place] < accept:
                    accepted += 1 / tokens
                    z = torch.minimum(q, p / lam).sum()
                    kept = torch.minimum(q, p / lam)[token] / z
                    weight = (p[token] / kept).item()
                    truncated |= weight > 1.3
                    loss = loss - min(weight, 1.3) * advantage * log_p[place, token] / tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    assert 0.3 < accepted < 0.9 and truncated

    told = one_step(path, algo, make_batch(groups, algo, temperature=temperature))
    assert told["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert told["rollout_corr/obrs_acceptance"] == pytest.approx(accepted)
    assert told["rollout_corr/obrs_kl_before"] == pytest.approx(kl_before, rel=1e-4)
    assert told["rollout_corr/obrs_kl_after"] < kl_before


@pytest.mark.parametrize("normalizer", [ObrsNormalizer.TOPK_TAIL, ObrsNormalizer.EXACT])
def test_where_rollout_and_trainer_agree_all_tokens_are_accepted_with_weight_1(path, model, normalizer):
    count = VOCAB if normalizer is ObrsNormalizer.EXACT else 8
    algo = replace(OBRS, obrs=ObrsConfig(top_k=8, normalizer=normalizer))
    groups = rollouts(model, scale=0.0, count=count)
    told = one_step(path, algo, make_batch(groups, algo))
    assert told["rollout_corr/obrs_acceptance"] == 1
    for name in (
        "rollout_is_mean",
        "rollout_is_min",
        "rollout_is_max",
        "rollout_is_eff_sample_size",
        "obrs_z",
    ):
        assert told[f"rollout_corr/{name}"] == pytest.approx(1, abs=1e-4), name
    assert told["rollout_corr/obrs_kl_before"] == pytest.approx(0, abs=1e-4)
    plain = replace(algo, correction=Correction.NONE)
    assert told["actor/grad_norm"] == pytest.approx(
        one_step(path, plain, make_batch(groups, plain))["actor/grad_norm"], rel=1e-4
    )


@pytest.mark.parametrize("budget", [64, 4096])
def test_sharing_prefixes_changes_neither_the_judgement_nor_the_step(path, model, budget):
    groups = rollouts(model, common=9)
    shared, alone = (make_batch(groups, OBRS, budget=budget, share=share) for share in (True, False))
    assert shared.shared_tokens > 20 and alone.shared_tokens == 0
    told = one_step(path, OBRS, shared)
    assert told == {name: pytest.approx(value, **SAME) for name, value in one_step(path, OBRS, alone).items()}
    assert 0.3 < told["rollout_corr/obrs_acceptance"] < 0.95


def test_a_vocabulary_or_layers_cut_over_two_ranks_give_the_same_steps(path, model, tmp_path):
    alone = TrainerConfig(lr=1e-2)
    work = [rollouts(model, seed=seed, common=7) for seed in range(2)]
    sizes = {"alone": alone, "tp": replace(alone, tp=2), "pp": replace(alone, pp=2)}
    runs = {name: Run(path=path, config=config, algo=OBRS, groups=work) for name, config in sizes.items()}
    mine = train(0, 1, tmp_path, {"alone": runs.pop("alone")})["alone"]["metrics"]
    for rank in run_ranks(train, 2, tmp_path, runs):
        for other in rank.values():
            for one, two in zip(mine, other["metrics"], strict=True):
                assert two == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in one.items()}
    assert mine[0]["rollout_corr/obrs_kl_before"] > 0.1


def test_the_reference_as_target_judges_alike_in_every_pass_over_a_batch(path, model):
    """The target then is the policy at the start; the current one moves between the passes."""
    groups, told = rollouts(model), {}
    for target in ObrsTarget:
        for epochs in (1, 2):
            algo = replace(OBRS, ppo_epochs=epochs, obrs=replace(OBRS.obrs, target=target))
            metrics = one_step(path, algo, make_batch(groups, algo))
            told[target, epochs] = [metrics[f"rollout_corr/obrs_{x}"] for x in ("z", "kl_before", "kl_after")]
    assert told[ObrsTarget.REFERENCE, 2] == pytest.approx(told[ObrsTarget.REFERENCE, 1], rel=1e-6)
    assert told[ObrsTarget.CURRENT, 2] != pytest.approx(told[ObrsTarget.CURRENT, 1], rel=1e-3)


def test_the_calibration_of_a_batch_serves_the_next_and_survives_a_checkpoint(path, model, tmp_path):
    algo = replace(OBRS, obrs=ObrsConfig(top_k=2, normalizer=ObrsNormalizer.TOPK))
    first, second = (make_batch(rollouts(model, seed=seed), algo) for seed in range(2))
    trainer = make_trainer(path, algo=algo)
    measured = step(trainer, first)["rollout_corr/obrs_kappa"]
    assert trainer.rule.kappa == measured > 1.05
    trainer.save(tmp_path / "checkpoint")
    uninterrupted = step(trainer, second)
    trainer.close()

    trainer = make_trainer(path, algo=algo)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.rule.kappa == measured
    assert step(trainer, second) == uninterrupted
    trainer.close()

    trainer = make_trainer(path, algo=algo)
    trainer.load(tmp_path / "checkpoint")
    trainer.rule.kappa = 1.0
    forgotten = step(trainer, second)["rollout_corr/obrs_z"]
    assert uninterrupted["rollout_corr/obrs_z"] == pytest.approx(forgotten * measured, rel=1e-6)
    trainer.close()


def test_a_run_with_obrs_logs_acceptance_divergences_and_calibration(tmp_path):
    overrides = [*SMALL, "val.every=0", "algo.correction=obrs", "run.save_every=0"]
    result = run_command("+recipe=swe_rl", "cluster=inline", "run.dir=out", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    trained = [r for r in map(json.loads, lines) if "rollout_corr/obrs_acceptance" in r]
    assert trained
    for record in trained:
        assert 0.9 < record["rollout_corr/obrs_acceptance"] <= 1
        assert record["rollout_corr/obrs_kl_after"] <= record["rollout_corr/obrs_kl_before"] + 1e-6
        for name in ("obrs_z", "obrs_z_ratio", "obrs_kappa", "rollout_is_eff_sample_size"):
            assert 0.9 < record[f"rollout_corr/{name}"] < 1.1, name
