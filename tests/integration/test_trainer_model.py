"""The Megatron model is the Hugging Face model: weights, logits, logprobs, gradients, draft."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.trainer import Precision, Recompute, TrainerConfig
from rlpipe.models import FAMILIES as FAMILIES_BY_NAME
from rlpipe.models.base import DENSE_LAYER, Layout
from rlpipe.models.checkpoint import MTP_PREFIX, is_mtp_weight, read_weights
from rlpipe.trainer.passes import Passes
from rlpipe.weights.payload import pack_weights, unpack_weights
from tests.helpers.float64 import rotated_in_float64, transformers_in_float64
from tests.helpers.tiny_checkpoint import DEEPSEEK_YARN, SCALED, write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer, stored_weights
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]


FAMILIES = {
    "mimo": {"family": "mimo"},
    "qwen2 tied": {"family": "qwen2", "tie": True},
    "qwen3 wide heads": {"family": "qwen3", "head_dim": 12},
    "qwen3 all heads grouped": {"family": "qwen3", "kv_heads": 1, "tie": True},
    "qwen3 moe": {"family": "qwen3_moe", "head_dim": 12},
    "qwen3 moe weights below 1": {"family": "qwen3_moe", "normed": False},
    "glm moe": {"family": "glm4_moe", "head_dim": 12},
    "glm moe without norms": {"family": "glm4_moe", "layers": 3, "qk_norm": False, "mtp_layers": 0},
    "deepseek": {"family": "deepseek_v3"},
    "deepseek yarn": {
        "family": "deepseek_v3",
        "query_rank": None,
        "groups": 1,
        "rope_parameters": DEEPSEEK_YARN,
    },
    "deepseek in halves": {"family": "deepseek_v3", "interleaved": False, "mtp_layers": 0},
    "qwen3 next": {"family": "qwen3_next", "head_dim": 12, "layers": 3},
    "qwen3.5": {"family": "qwen3_5_text", "head_dim": 12, "tie": True},
    "qwen3.5 that sees": {"family": "qwen3_5"},
    "qwen3.5 moe": {"family": "qwen3_5_moe", "head_dim": 12, "layers": 3},
    "mistral": {"family": "mistral", "head_dim": 12},
    "llama theta": {
        "family": "llama",
        "kv_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "llama 3.1": {"family": "llama", "rope_parameters": SCALED["llama3"]},
    "qwen2 yarn": {"family": "qwen2", "head_dim": 16, "rope_parameters": SCALED["yarn"]},
}


def shifted(tokens, depths):
    """What anchors of plain rows [B, S] read at each depth, [depths, B, S]; 0 past the end."""
    return torch.stack([torch.nn.functional.pad(tokens[:, k:], (0, k)) for k in range(1, depths + 1)])


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def checkpoint(request, tmp_path):
    return write_random_checkpoint(tmp_path / "model", **FAMILIES[request.param])


@pytest.fixture
def trainer_of():
    """Trainers that are closed at the end: a process has one at a time."""
    made = []

    def make(*args, **kwargs):
        made.append(make_trainer(*args, **kwargs))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def token_logprobs_of(model, ids, temperature=1.0):
    """[T - 1] logprobs of a Hugging Face model at the tokens that follow."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_weights_come_back_bit_for_bit(checkpoint, trainer_of):
    weights, exported = stored_weights(checkpoint), trainer_of(checkpoint).export_weights()
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight), name


def test_a_tied_head_travels_once(tmp_path, trainer_of):
    path = write_random_checkpoint(tmp_path, family="qwen2", tie=True)
    payload = pack_weights(trainer_of(path).export_weights(), version=1)
    assert "lm_head.weight" not in unpack_weights(payload)
    sizes = [tensor.nbytes for tensor in stored_weights(path).values()]
    assert sum(sizes) <= payload.num_bytes < sum(sizes) + 16 * len(sizes)


def test_a_wrong_entry_in_a_familys_table_shows_in_the_logits(tmp_path, trainer_of, monkeypatch):
    """Gate and up exchanged have the right shapes and come back bit for bit; only the logits show it."""
    family, part = FAMILIES_BY_NAME["qwen2"], next(p for p in DENSE_LAYER if p.layout is Layout.GATE_UP)
    wrong = dataclasses.replace(part, hf=part.hf[::-1])
    layer = tuple(wrong if p is part else p for p in family.layer)
    monkeypatch.setitem(FAMILIES_BY_NAME, "qwen2", dataclasses.replace(family, layer=layer))
    path = write_random_checkpoint(tmp_path / "model", "qwen2")
    trainer, ids = trainer_of(path), torch.arange(40)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        assert (trainer.model.logits(ids) - expected).abs().max() > 0.1


def test_logits_equal_transformers(checkpoint, trainer_of):
    trainer = trainer_of(checkpoint)
    ids = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint)(ids).logits
        found = trainer.model.logits(ids)
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # the comparison is not of zeros


def test_logits_in_float64_equal_those_of_transformers_code_in_float64(checkpoint, trainer_of, monkeypatch):
    model = rotated_in_float64(trainer_of(checkpoint).model, checkpoint)
    ids = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.logits(ids)
        expected = transformers_in_float64(checkpoint, monkeypatch)(ids).logits
    assert found.dtype is expected.dtype is torch.float64
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("common", [0, 9], ids=["own prompts", "shared prompts"])
def test_logprobs_equal_transformers_at_the_rollout_temperature(checkpoint, trainer_of, common):
    trainer, groups = trainer_of(checkpoint), make_groups(common=common)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = trainer.logprobs(make_batch(groups, AlgoConfig(), temperature=0.7))
    trajectories = [t for g in groups for t in g.trajectories]
    for trajectory, own in zip(trajectories, found, strict=True):
        mask = torch.tensor(trajectory.loss_mask.tolist()[1:])
        with torch.no_grad():
            expected = token_logprobs_of(model, trajectory.token_ids.tolist(), 0.7) * mask
        assert own[0] == 0.0
        torch.testing.assert_close(torch.tensor(own[1:]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("common", [0, 9], ids=["own prompts", "shared prompts"])
def test_the_gradient_step_equals_plain_autograd_on_the_transformers_model(
    checkpoint, trainer_of, common, tmp_path
):
    """A large epsilon makes AdamW nearly linear in the gradient, so the weights tell of its direction."""
    groups, algo = make_groups(common=common), AlgoConfig()
    trainer = trainer_of(checkpoint, TrainerConfig(lr=1e-2, clip_grad=0.0, eps=1e-3))
    batch = make_batch(groups, algo)
    assert (batch.shared_tokens > 50) == bool(common)
    metrics = trainer.train_step(batch)

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)
    trajectories = [t for g in groups for t in g.trajectories]
    tokens = sum(t.response_length for t in trajectories)
    loss = 0.0
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            logprobs = token_logprobs_of(model, t.token_ids.tolist())
            weight = (logprobs.detach() - torch.tensor(t.rollout_logprobs[1:])).exp().clamp(max=2.0)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = loss - (ratio * advantage * weight * torch.tensor(t.loss_mask.tolist()[1:])).sum() / tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    optimizer.step()

    assert metrics["actor/grad_norm"].value() == pytest.approx(norm, rel=1e-5)
    assert metrics["actor/pg_loss"].value() == pytest.approx(loss.item(), rel=1e-4, abs=1e-7)
    exported = trainer.export_weights()
    model.save_pretrained(tmp_path / "stepped")  # in memory transformers fuses experts
    stepped = stored_weights(tmp_path / "stepped")
    assert stepped.keys() == {name for name in exported if not is_mtp_weight(name)}
    for name, weight in stepped.items():
        assert (exported[name] - weight).abs().max() < 2e-5, name


def test_the_bias_of_the_choice_of_experts_stays_in_float32_and_is_not_trained(tmp_path, trainer_of):
    """Servers keep it and the router so, whatever the others are; Megatron would move it after each step."""
    path = write_random_checkpoint(tmp_path / "model", "glm4_moe")
    trainer = trainer_of(path, TrainerConfig(lr=1e-2, precision=Precision.BF16))
    trainer.train_step(make_batch(make_groups(), AlgoConfig()))
    sent = [pair for bucket in trainer.weight_buckets(1, torch.bfloat16) for pair in bucket]
    planned = [pair for bucket in trainer.bucket_plan(1, torch.bfloat16) for pair in bucket]
    assert [(n, t.dtype, t.shape) for n, t in sent] == [(n, t.dtype, t.shape) for n, t in planned]
    weights, biases = read_weights(path), 0
    for name, tensor in sent:
        assert tensor.dtype is (torch.float32 if ".mlp.gate." in name else torch.bfloat16), name
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, weights[name])
            biases += 1
    assert biases == 2


def test_the_products_that_a_server_fuses_are_sent_in_one_bucket(tmp_path, trainer_of):
    """The large q_b_proj lies between them in the model, and a bucket ends there."""
    path = write_random_checkpoint(tmp_path / "model", "deepseek_v3", vocab=4000, hidden=128, query_rank=1500)
    sent = [dict(bucket) for bucket in trainer_of(path).weight_buckets(1, torch.float32)]
    places = {name: i for i, bucket in enumerate(sent) for name in bucket}
    for name, place in places.items():
        if "kv_a_proj_with_mqa" in name:
            assert places[name.replace("kv_a_proj_with_mqa", "q_a_proj")] == place
    assert len(sent) > 3


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_recomputation_changes_nothing_but_what_is_kept_for_the_gradient(tmp_path, family):
    path = write_random_checkpoint(tmp_path / "model", family)
    batch, norms, kept = make_batch(make_groups(common=9), AlgoConfig()), {}, {}
    for recompute in Recompute:
        trainer = make_trainer(path, TrainerConfig(lr=1e-2, recompute=recompute))
        size = Counter()

        def keep(tensor, size=size):
            size["bytes"] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.model.hidden_states(torch.arange(60)[None])
        kept[recompute] = size["bytes"]
        norms[recompute] = trainer.train_step(batch)["actor/grad_norm"].value()
        trainer.close()
    assert list(norms.values()) == [pytest.approx(norms[Recompute.NONE], rel=1e-6)] * len(Recompute)
    assert kept[Recompute.FULL] < kept[Recompute.SELECTIVE] < 0.8 * kept[Recompute.NONE]


def test_layers_that_read_rows_only_get_the_same_step_from_a_batch_without_sharing(tmp_path, monkeypatch):
    """TransformerEngine's layers are such; here the local ones take their place."""
    path, algo = write_random_checkpoint(tmp_path / "model", "mimo"), AlgoConfig(kl_coef=0.1)
    groups, told = make_groups(common=9), {}
    for share in (True, False):
        monkeypatch.setattr(Passes, "shares_prefixes", share)
        trainer, batch = make_trainer(path, algo=algo), make_batch(groups, algo, share=share)
        assert bool(batch.shared_tokens) is share and bool(batch.padding_tokens)
        logprobs = [x for line in trainer.logprobs(batch) for x in line]
        metrics = {k: v.value() for k, v in trainer.train_step(batch).items() if "timing" not in k}
        told[share] = logprobs, metrics, trainer.export_weights()
        trainer.close()
    assert told[False][0] == pytest.approx(told[True][0], abs=1e-5)
    assert told[False][1] == {k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in told[True][1].items()}
    for name, weight in told[True][2].items():
        torch.testing.assert_close(told[False][2][name], weight, atol=1e-4, rtol=0)


def test_a_shared_batch_is_refused_by_layers_that_read_rows_only(tmp_path, trainer_of, monkeypatch):
    trainer = trainer_of(write_random_checkpoint(tmp_path / "model", "mimo"))
    monkeypatch.setattr(Passes, "shares_prefixes", False)
    with pytest.raises(ValueError, match=r"share_prefixes=trainer\.shares_prefixes"):
        trainer.train_step(make_batch(make_groups(common=9), AlgoConfig()))


def test_the_draft_equals_the_reference_layer_at_every_depth(tmp_path, trainer_of):
    from transformers import AutoConfig

    from recipes.tiny_model.layer import MtpLayer, unroll
    from rlpipe.drafts.megatron_draft import draft_hidden_states

    path = write_random_checkpoint(tmp_path / "model", "mimo")
    trainer = trainer_of(path)
    reference = MtpLayer(AutoConfig.from_pretrained(path))
    weights = read_weights(path)
    reference.load_state_dict(
        {k.removeprefix(MTP_PREFIX): w for k, w in weights.items() if k.startswith(MTP_PREFIX)}
    )
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = trainer.model.hidden_states(ids).view(2, 17, -1)
        rotary = trainer.model.rotary(np.arange(17))
        found = draft_hidden_states(
            trainer.model, hidden.transpose(0, 1), shifted(ids, 3), rotary_pos_emb=rotary
        )
        embed = torch.nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"])
        expected = unroll(reference, embed, hidden, ids, gamma=3)
    for depth, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        torch.testing.assert_close(mine.transpose(0, 1)[:, : 17 - depth], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recompute", Recompute)
def test_draft_gradients_stay_in_the_draft_and_are_not_lost(tmp_path, trainer_of, recompute):
    """A detached input plus recomputation silently gives zero gradients, unless the input requires one."""
    from rlpipe.drafts.megatron_draft import draft_hidden_states

    path = write_random_checkpoint(tmp_path / "model", "mimo")
    trainer = trainer_of(path, TrainerConfig(recompute=recompute))
    model = trainer.model
    model.mtp.requires_grad_(True)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = model.hidden_states(ids).view(2, 9, -1).transpose(0, 1)
    states = draft_hidden_states(model, hidden, shifted(ids, 2), rotary_pos_emb=model.rotary(np.arange(9)))
    sum(h.square().sum() for h in states).backward()
    for name, parameter in model.named_parameters():
        got = parameter.grad is not None and bool(parameter.grad.any())
        assert got == name.startswith("mtp."), name


def test_an_unfrozen_draft_has_its_own_learning_rate_and_clipping_also_after_a_resume(tmp_path, trainer_of):
    """Groups that differ in nothing but their learning rate are mixed up by Megatron's load."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from rlpipe.config.draft import DraftConfig
    from rlpipe.trainer.optimizer import PolicyOptimizer

    trainer = trainer_of(write_random_checkpoint(tmp_path / "model", "mimo"))
    assert not any(p.requires_grad for p in trainer.model.mtp.parameters())
    trainer.model.mtp.requires_grad_(True)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(trainer.model.config, ddp, trainer.model)
    config, mtp = TrainerConfig(lr=1e-2, clip_grad=0.5), DraftConfig(lr=3e-3, clip_grad=0.25)

    def step():
        for parameter in trainer.model.parameters():
            parameter.main_grad.fill_(1.0)
        return trainer.optimizer.step({"policy": 1.0, "mtp": 1.0})

    trainer.optimizer = PolicyOptimizer(config, mtp, wrapped, steps=10)
    outcome = step()
    sizes = {"policy": 0, "mtp": 0}
    for name, parameter in trainer.model.named_parameters():
        sizes["mtp" if name.startswith("mtp.") else "policy"] += parameter.numel()
    assert outcome.grad_norms == {tag: pytest.approx(size**0.5) for tag, size in sizes.items()}
    for tag, clip in (("policy", 0.5), ("mtp", 0.25)):
        gradients = [p.grad.flatten() for p in trainer.optimizer._parameters(tag)]
        assert torch.cat(gradients).norm().item() == pytest.approx(clip, rel=1e-3)
    trainer.save(tmp_path / "checkpoint")
    trainer.optimizer = PolicyOptimizer(config, mtp, wrapped, steps=10)
    trainer.load(tmp_path / "checkpoint")
    assert step().lrs == {"policy": pytest.approx(1e-2), "mtp": pytest.approx(3e-3)}


def test_a_checkpoint_of_an_unknown_family_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "llama")
    config = json.loads((path / "config.json").read_text()) | {"model_type": "gpt2"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        make_trainer(path)
    path = write_random_checkpoint(tmp_path / "other", "llama")
    make_trainer(path).close()  # the failure left no process group behind


def test_a_checkpoint_that_lacks_tensors_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    path = write_random_checkpoint(tmp_path / "model", "mimo")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \['model.layers.1.mlp.up_proj.weight'\]"):
        make_trainer(path)


def test_without_correction_staleness_does_not_weigh_tokens(tmp_path, trainer_of):
    path = write_random_checkpoint(tmp_path / "model", "mimo")
    groups = make_groups()
    for t in (t for g in groups for t in g.trajectories):
        t.rollout_logprobs = t.rollout_logprobs - 3
    losses = {}
    for correction in (Correction.NONE, Correction.TIS_TOKEN):
        algo = AlgoConfig(correction=correction)
        trainer = make_trainer(path, algo=algo)
        losses[correction] = trainer.train_step(make_batch(groups, algo))["actor/pg_loss"].value()
        trainer.close()
    assert not np.isclose(*losses.values())


def test_a_trainer_of_dense_layers_and_experts_continues_from_its_checkpoint(tmp_path, trainer_of):
    path = write_random_checkpoint(tmp_path / "model", "glm4_moe", layers=3)
    batch, first = make_batch(make_groups(), AlgoConfig()), trainer_of(path)
    first.train_step(batch)
    first.save(tmp_path / "saved")
    first.train_step(batch)
    expected = first.export_weights()
    first.close()
    second = trainer_of(path)
    second.load(tmp_path / "saved")
    second.train_step(batch)
    for name, weight in second.export_weights().items():
        assert torch.equal(weight, expected[name]), name
