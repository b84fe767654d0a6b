"""Training an EAGLE-3 draft: the loss written out, resuming, and the recipe through the command line."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rlpipe.actors.trainers as trainers
import rlpipe.drafts.standalone_trainer as eagle3
from rlpipe.batching.packing import pack
from rlpipe.config.draft import DraftConfig
from rlpipe.config.drafters import Drafter
from rlpipe.config.eagle3 import Eagle3Config
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import Config, ModelConfig, Task
from rlpipe.config.spec import SpecMode
from rlpipe.config.trainer import TrainerConfig
from rlpipe.drafts.kinds.eagle3 import make_trainer
from rlpipe.drafts.loss import depth_targets, mtp_loss
from rlpipe.drafts.standalone_trainer import DraftTrainer
from rlpipe.metrics.values import reduce
from rlpipe.preflight.settings import check
from tests.helpers.cli import ROOT, run
from tests.helpers.driven_engine import driven_engine
from tests.helpers.engines import request
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.integration
TEMPERATURE = 0.8
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model without an MTP layer."""
    return write_random_checkpoint(tmp_path_factory.mktemp("target"), "qwen3", layers=4, head_scale=0.4)


@pytest.fixture(scope="module")
def trajectories():
    """Two turns each, siblings with common prompts."""
    return [t for group in make_groups(seed=3, common=6) for t in group.trajectories]


def make(target, trajectories, draft=None, **mtp) -> DraftTrainer:
    settings = {"depths": 3, "lr": 3e-3, "clip_grad": 0.0} | mtp
    config = Config(
        model=ModelConfig(path=str(target)),
        draft=DraftConfig(**settings),
        eagle3=Eagle3Config(**(draft or {})),
        rollout=RolloutConfig(max_context=64, device="cpu"),
        trainer=TrainerConfig(micro_batch_tokens=96),
    )
    return make_trainer(config, "", trajectories, train_alongside=trainers.train_alongside)


def packed(trajectories):
    batch = pack(trajectories, None, 96, temperature=TEMPERATURE, share_prefixes=False)
    assert len(batch.minibatches[0].shards[0]) > 2  # several passes, some of several rows
    return batch


def written_out(target, draft, trajectories, mtp):
    """Loss and statistics with transformers' features, one trajectory at a time."""
    model, parts = AutoModelForCausalLM.from_pretrained(target), []
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.token_ids.tolist()])
        length, depths = ids.shape[1], mtp.depths
        with torch.no_grad():
            found = model(ids, output_hidden_states=True)
            embedded = model.get_input_embeddings()(torch.nn.functional.pad(ids, (0, depths)))
        features = torch.cat([found.hidden_states[layer + 1] for layer in draft.shape.layers], -1)
        ahead = torch.stack([embedded[:, k : k + length] for k in range(1, depths + 1)])
        states = torch.stack(draft.unroll(features, ahead), 2)[0]
        targets = depth_targets(ids, torch.tensor([trajectory.loss_mask.tolist()]).bool(), depths)
        places = (torch.arange(length)[:, None] + torch.arange(1, depths + 1)).clamp(max=length - 1)
        parts.append(
            mtp_loss(
                mtp.objective,
                draft.logits(states),
                found.logits[0][places],
                mask=targets.mask,
                tokens=targets.tokens,
                anchors=mtp.anchors,
                turn_starts=targets.turn_starts,
                temperature=TEMPERATURE,
                normalizer=1.0,
            )
        )
    loss, stats = parts[0]
    for more, other in parts[1:]:
        loss, stats = loss + more, stats + other
    return loss / stats.weight, stats


CASES = {
    "kl": ({"objective": "kl"}, {}),
    "one step": ({"objective": "hard_ce", "depths": 1}, {"layers": [2]}),
    "chain, reduced vocabulary": ({"objective": "e2e_tv"}, {"draft_vocab": 20, "layers": [2, 0]}),
    "whole turns": ({"objective": "verify_steps"}, {"draft_vocab": 40}),
    "visits": ({"objective": "lk", "anchors": "visit"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_loss_and_gradient_of_the_definition(target, trajectories, monkeypatch, case):
    """Rows, turns and passes are cut as they come."""
    monkeypatch.setitem(eagle3.LOGIT_BYTES, "cpu", 3 * 64 * 4 * 30)  # two or three turns at once
    mtp, draft = CASES[case]
    trainer = make(target, trajectories, draft, **mtp)
    expected = copy.deepcopy(trainer._draft)
    loss, stats = written_out(target, expected, trajectories, trainer._settings)
    loss.backward()
    found = trainer.mtp_stats(packed(trajectories))
    metrics = reduce([trainer.adapt_step(packed(trajectories))])
    assert metrics["mtp/loss"].value() == pytest.approx(loss.item(), abs=1e-5)
    for name in ("count", "alpha", "emitted", "verify_steps", "draft_entropy"):
        assert torch.allclose(getattr(found, name), getattr(stats, name), atol=1e-3), name
    for (name, ours), theirs in zip(trainer._draft.named_parameters(), expected.parameters(), strict=True):
        assert theirs.grad.abs().max() > 0, name
        assert (ours.grad - theirs.grad).abs().max() < 1e-4 * theirs.grad.abs().max() + 1e-7, name


def test_the_top_layer_is_read_before_the_final_norm(target, trajectories):
    trainer = make(target, trajectories, {"layers": [3]})
    model, seen = AutoModelForCausalLM.from_pretrained(target), []
    model.model.layers[3].register_forward_hook(lambda *args: seen.append(args[2]))
    ids = torch.tensor([trajectories[0].token_ids.tolist()])
    with torch.no_grad():
        model(ids)
    _, features = trainer._read_target(ids.numpy(), np.array([ids.shape[1]]))
    top = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert (features - top).abs().max() < 1e-4


def test_training_raises_the_overlap_and_a_resumed_run_is_bit_equal(target, trajectories, tmp_path):
    batch = packed(trajectories)
    whole = make(target, trajectories, objective="kl", warmup_steps=2)
    before = whole.mtp_stats(batch)
    for step in range(6):
        whole.adapt_step(batch)
        if step == 2:
            whole.save(tmp_path / "trainer")
            whole.save_hf(tmp_path / "draft")
    resumed = make(target, trajectories, objective="kl", warmup_steps=2)
    resumed.load(tmp_path / "trainer")
    for _ in range(3):
        resumed.adapt_step(batch)
    pairs = zip(whole._draft.parameters(), resumed._draft.parameters(), strict=True)
    assert resumed.updates == 6 and all(torch.equal(a, b) for a, b in pairs)
    after = whole.mtp_stats(batch)
    assert (after.alpha > before.alpha).all() and (after.kl < 0.9 * before.kl).all()
    again = make(target, trajectories, {"start": str(tmp_path / "draft")}, objective="kl")
    assert again.mtp_stats(batch).kl.sum() < before.kl.sum()  # trained further, not from nothing


def test_a_step_without_a_drafted_token_changes_nothing(target, trajectories):
    trainer = make(target, trajectories)
    empty = copy.deepcopy(trajectories[:2])
    for trajectory in empty:
        sampled = [i for i, m in enumerate(trajectory.loss_mask.tolist()) if m]
        trajectory.loss_mask = np.arange(len(trajectory.loss_mask)) == sampled[0]
    before = copy.deepcopy(trainer._draft.state_dict())
    batch = pack(empty, None, 96, temperature=TEMPERATURE, share_prefixes=False)
    metrics = reduce([trainer.adapt_step(batch)])
    assert metrics["mtp/skipped_steps"].value() == 1 and trainer.updates == 0
    assert all(torch.equal(t, trainer._draft.state_dict()[n]) for n, t in before.items())


def test_a_reduced_vocabulary_is_that_of_the_data(target, trajectories):
    trainer = make(target, trajectories, {"draft_vocab": 5})
    sampled = [
        t
        for one in trajectories
        for t, m in zip(one.token_ids.tolist(), one.loss_mask.tolist(), strict=True)
        if m
    ]
    often = sorted(set(sampled), key=lambda token: (-sampled.count(token), token))[:5]
    assert trainer._draft.ids.tolist() == sorted(often)


def test_what_cannot_be_trained_is_refused_at_launch(target, tmp_path):
    def adapting(model=target, **settings):
        config = Config(task=Task.MTP_ADAPT, model=ModelConfig(path=str(model)), **settings)
        config.adapt.drafter = Drafter.EAGLE3
        config.spec.mode = SpecMode.NONE
        config.run.dir, config.rollout.max_context = str(tmp_path / "run"), 64
        return config

    check(adapting())
    with pytest.raises(ValueError, match=r"eagle3\.layers=\[7\]"):
        check(adapting(eagle3=Eagle3Config(layers=[7])))
    with pytest.raises(ValueError, match="vocabulary of 64"):
        check(adapting(eagle3=Eagle3Config(draft_vocab=100)))
    with pytest.raises(ValueError, match=r"eagle3\.start"):
        check(adapting(eagle3=Eagle3Config(start=str(tmp_path / "nothing"))))
    check(adapting(draft=DraftConfig(objective="ppow")))
    greedy = adapting(draft=DraftConfig(objective="ppow"))
    greedy.rollout.temperature = 0
    with pytest.raises(ValueError, match=r"rollout\.temperature=0 leaves no distribution"):
        check(greedy)


def test_the_recipe_leaves_a_draft_that_the_engine_drafts_with(tmp_path):
    small = ["adapt.prompts=4", "adapt.samples=2", "adapt.batch=4", "adapt.eval_prompts=2"]
    small += ["adapt.eval_samples=1", "adapt.in_domain=[swe.held_instances]", "adapt.out_of_domain=[]"]
    small += ["metrics.wandb=off", "run.steps=1", "adapt.eval_first=false", "eagle3.draft_vocab=300"]
    result = run("+recipe=eagle3", "run.dir=out", *small, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    out = tmp_path / "out"
    (record,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert record["mtp/grad_norm"] > 0 and "adapt/swe.held_instances/rejection/acceptance_length" in record
    assert record["adapt/swe.held_instances/predicted_tokens_per_step"] >= 1
    assert sorted(p.name for p in (out / "draft").iterdir()) == ["config.json", "model.safetensors"]
    assert (
        not (out / "model").exists() and json.loads((out / "results.json").read_text())["drafter"] == "eagle3"
    )
    with driven_engine(TINY, "block", drafter="eagle3", draft_path=out / "draft") as driven:
        (answer,) = driven.generate(request(1, [3, 4, 5], max_new_tokens=8))
    assert answer.spec.verify_steps > 0
