"""The jackpot recipe: a small model generates, a larger policy learns, and validation plays the policy."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.config.decoupled import DecoupledConfig
from rlpipe.config.paths import resolve, shipped
from rlpipe.config.run import Config
from rlpipe.models.checkpoint import read_weights
from rlpipe.types import Prompt
from rlpipe.weights.payload import pack_weights, unpack_weights
from tests.helpers.candidates import policy_logprobs
from tests.helpers.cli import SMALL, run, undeclared

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

ACTOR = "shipped:models/tiny_actor"


def decoupled(**val):
    config = Config(decoupled=DecoupledConfig(path=ACTOR))
    config.env.name = "reasoning"
    for name, value in val.items():
        setattr(config.val, name, value)
    return config


def gap(model, trajectory):
    """Largest difference of the trajectory's logprobs and a model's."""
    with torch.no_grad():
        log_p = policy_logprobs(model, trajectory)
    return max(
        abs(log_p[place, trajectory.token_ids[place]].item() - trajectory.rollout_logprobs.tolist()[place])
        for place, sampled in enumerate(trajectory.loss_mask.tolist())
        if sampled
    )


def test_the_recipe_trains_both_models_and_keeps_both(tmp_path):
    overrides = [*SMALL, "pipeline.max_staleness=0", "algo.entropy_coef=0.01"]
    result = run("+recipe=jackpot", "cluster=inline", "run.dir=out", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["training/global_step"] for r in records] == [0, 1, 2] and "val/reward" in records[0]
    for step in records[1:]:
        assert step["decoupled/rollout_probs_diff_max"] < 1e-3, "the actor generated"
        assert step["training/rollout_probs_diff_max"] > 0.1, "the policy did not"
        assert 0.01 < step["decoupled/kl"] < 2 and 0.5 < step["rollout_corr/obrs_acceptance"] < 1
        assert step["decoupled/distill_loss"] == pytest.approx(step["decoupled/kl"], rel=1e-3)
        assert step["decoupled/grad_norm"] > 0 and step["timing_s/update_decoupled"] > 0
    assert undeclared(tmp_path / "out") == []
    both = records[2]["weights/bytes"] / records[1]["weights/bytes"]
    assert both > 3, "the policy's weights travel where they are validated, not before"
    checkpoint = tmp_path / "out" / "checkpoints" / "step_2"
    for start, end in (("tiny", "hf"), ("tiny_actor", "actor_hf")):
        before, after = read_weights(shipped(f"models/{start}")), read_weights(checkpoint / end)
        assert {n: w.shape for n, w in before.items()} == {n: w.shape for n, w in after.items()}
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_training_rollouts_are_the_actors_and_validation_is_the_policys():
    config = decoupled(every=2)
    paths = [resolve(path) for path in (ACTOR, config.model.path)]
    actor, policy = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    moved = [{name: weight.float() * 0.9 for name, weight in read_weights(path).items()} for path in paths]

    async def play():
        worker = RolloutWorker(config)
        try:
            name = next(iter(worker._suite.instance_ids(worker._suite.splits()[0])))
            told = []
            for payload in (
                None,
                pack_weights(moved[0], 1),
                pack_weights(moved[0], 2, pack_weights(moved[1], 2)),
            ):
                if payload is not None:
                    await worker.update_weights(payload)
                group = await worker.collect(Prompt(instance_id=name, group_id="g"), 2)
                told.append((group.trajectories, await worker.evaluate([name], 2, 1.0)))
            return told
        finally:
            await worker.close()

    first, second, third = asyncio.run(asyncio.wait_for(play(), 60))
    assert max(gap(actor, t) for t in first[0]) < 1e-3 < 0.05 < max(gap(policy, t) for t in first[0])
    assert max(gap(policy, t) for t in first[1] + second[1]) < 1e-3
    assert [{v for t in turn for v in t.versions.tolist()} for turn in second] == [{-1, 1}, {-1, 0}]
    assert [{v for t in turn for v in t.versions.tolist()} for turn in third] == [{-1, 2}, {-1, 2}]
    policy.load_state_dict(moved[1], strict=False)
    assert max(gap(policy, t) for t in third[1]) < 1e-3


def test_the_trainer_sends_the_policy_only_where_it_is_validated():
    config = decoupled(every=2)
    config.run.steps = 3
    worker = TrainerWorker(config)
    worker.start()
    payloads = {version: worker.export(version) for version in (1, 2, 3)}
    worker.close()
    assert [version for version, payload in payloads.items() if payload.policy] == [2, 3]
    hidden = [unpack_weights(p)["model.norm.weight"].shape for p in (payloads[2], payloads[2].policy)]
    assert hidden == [(96,), (128,)]


def test_a_run_that_never_validates_keeps_no_engine_for_the_policy():
    worker = RolloutWorker(decoupled(every=0))
    assert worker._policy is None
    asyncio.run(worker.close())
