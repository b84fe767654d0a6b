"""Fingerprints: what the server should hold for given weights, and how a difference is told."""

import dataclasses

import pytest
import torch

from rlpipe.config.drafters import Drafter
from rlpipe.models import FAMILIES
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights.canary import Shard, compare, explain, server_parts
from rlpipe.weights.fingerprint import fingerprints
from tests.helpers.eagle3_drafts import random_draft
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


CONFIG = {"model_type": "mimo", "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return read_weights(write_random_checkpoint(tmp_path_factory.mktemp("model"), vocab=100, layers=1))


def tensors(weights, shard=None, *, drafter=Drafter.MTP, **changed):
    shard = shard or Shard(kv_heads=2)
    parts = server_parts(weights, shard, CONFIG | changed, dtype=torch.float32, drafter=drafter)
    return {name: torch.cat(tuple(pieces)) for name, pieces in parts.items()}


def hashes(weights):
    return fingerprints({name: [one] for name, one in tensors(weights).items()}, on_gpu=False)


def test_projections_are_fused_in_the_order_of_the_server(weights):
    found = tensors(weights)
    layer = "model.layers.0.self_attn."
    parts = [weights[f"{layer}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found[f"{layer}qkv_proj.weight"], torch.cat(parts))
    mlp = "model.mtp_layers.0.mlp."
    parts = [weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(found["draft.model.mtp_block.mlp.gate_up_proj.weight"], torch.cat(parts))


def test_the_draft_has_the_targets_embedding_and_head(weights):
    found = tensors(weights)
    assert torch.equal(found["draft.lm_head.weight"], found["lm_head.weight"])
    assert found["lm_head.weight"].shape[0] == 128 and not found["lm_head.weight"][100:].any()


def test_a_grafted_llama_is_expected_with_the_zero_biases_of_the_class_that_serves_it(weights, tmp_path):
    llama = read_config(write_random_checkpoint(tmp_path, "llama", layers=1))
    grafted = llama | {"num_nextn_predict_layers": 1}
    without = {name: one for name, one in weights.items() if not name.endswith("bias")}

    found = tensors(without, **grafted)
    biases = {"model.layers.0.self_attn.qkv_proj.bias", "draft.model.mtp_block.self_attn.qkv_proj.bias"}
    assert {name for name in found if name.endswith("bias")} == biases
    assert not any(found[name].any() for name in biases)
    assert {len(found[name]) for name in biases} == {len(found["model.layers.0.self_attn.qkv_proj.weight"])}
    assert not [name for name in tensors(without, drafter=None, **llama) if name.endswith("bias")]


def test_without_a_draft_only_the_target_is_expected(weights):
    assert not [name for name in tensors(weights, drafter=None) if "draft" in name or "mtp" in name]


def test_a_tied_head_is_not_expected(weights):
    assert "lm_head.weight" not in tensors(weights, tie_word_embeddings=True)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_all_ranks_make_up_the_whole(weights, size):
    """Each rank's part of each projection, put together again; kv heads beyond their number repeat."""
    whole = tensors(weights)
    ranks = [tensors(weights, Shard(rank=rank, size=size, kv_heads=2)) for rank in range(size)]
    for name, dim in (("mlp.down_proj", 1), ("self_attn.o_proj", 1)):
        name = f"model.layers.0.{name}.weight"
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks]), whole["lm_head.weight"])
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    for rank, found in enumerate(ranks):
        head = rank * 2 // size
        expected = [q.chunk(size)[rank], k.chunk(2)[head], v.chunk(2)[head]]
        assert torch.equal(found["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(expected))


def test_one_changed_number_changes_one_fingerprint(weights):
    served = hashes(weights)
    changed = dict(weights)
    name = "model.mtp_layers.0.input_proj.weight"
    changed[name] = changed[name].clone()
    changed[name][0, 0] += 1e-6
    report = compare(hashes(changed), served)
    assert report.draft == ["draft.model.input_proj.weight"] and not report.target and not report.passed
    assert "1 of the draft (first draft.model.input_proj.weight)" in report.summary()


def test_a_tensor_only_one_side_has_counts_as_different():
    assert compare({"a": "1", "b": "2"}, {"b": "2", "draft.c": "3"}).target == ["a"]
    assert compare({"b": "2"}, {"b": "2", "draft.c": "3"}).draft == ["draft.c"]


def served_as(parts, **changed):
    """What a server with the plugin says of these tensors."""
    told = {}
    for name, pieces in parts.items():
        whole = torch.cat(tuple(pieces))
        shape = "x".join(map(str, whole.shape))
        told[name] = f"{fingerprints({name: pieces}, on_gpu=False)[name]} float32 {shape}"
    return told | changed


def test_a_difference_says_who_has_what(weights):
    """A tensor that nobody maps, one that is not there, one of another shape, and other numbers."""
    parts = server_parts(weights, Shard(kv_heads=2), CONFIG, dtype=torch.float32, drafter=Drafter.MTP)
    expected = fingerprints(parts, on_gpu=False)
    served = served_as(parts, **{"model.layers.0.new_gate.weight": "00 bfloat16 4x32"})
    assert compare(expected, served_as(parts)).passed
    gone, other, wrong = "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "draft.lm_head.weight"
    del served[gone]
    served[other] = "00 float32 32x96"
    served[wrong] = f"00 {served[wrong].partition(' ')[2]}"
    report = compare(expected, served)
    kinds = explain(report, parts, served)
    assert {*report.target, *report.draft} == {gone, other, wrong, "model.layers.0.new_gate.weight"}
    assert kinds == {other: ("float32 32x96", "float32 32x64")}
    assert report.reasons == {
        gone: "the server has no tensor of this name",
        other: "the server keeps float32 32x96, and what was sent is float32 32x64",
        "model.layers.0.new_gate.weight": "a tensor of the server (bfloat16 4x32) that no table maps: "
        "add it to the family's (rlpipe/models)",
    }
    assert "new_gate" in report.summary() or "down_proj" in report.summary()
    stock = {name: told.partition(" ")[0] for name, told in served.items()}  # without the plugin
    report = compare(expected, stock)
    assert not explain(report, parts, stock) and [*report.reasons] == [gone]


@pytest.mark.parametrize("size", [1, 2])
def test_experts_are_expected_with_the_channels_to_which_a_server_pads_them(tmp_path, size):
    path = write_random_checkpoint(tmp_path / "experts", "qwen3_moe", expert_intermediate=12, layers=1)
    config, weights = read_config(path), read_weights(path)
    prefix = "model.layers.0.mlp.experts."
    for rank in range(size):
        shard = Shard(rank=rank, size=size, kv_heads=2, channels=64)
        parts = server_parts(weights, shard, config, dtype=torch.float32, drafter=None)
        gate_up = torch.cat(tuple(parts[f"{prefix}w13_weight"])).view(8, 2, 64 // size, 32)
        down = torch.cat(tuple(parts[f"{prefix}w2_weight"])).view(8, 32, 64 // size)
        own = max(0, 12 - rank * 64 // size)
        for place, name in enumerate(("gate", "up")):
            assert torch.equal(gate_up[3, place, :own], weights[f"{prefix}3.{name}_proj.weight"][:own])
        assert torch.equal(down[3, :, :own], weights[f"{prefix}3.down_proj.weight"][:, :own])
        assert not gate_up[:, :, own:].any() and not down[..., own:].any()


def test_a_shared_expert_is_expected_as_wide_as_the_experts_that_it_stands_for(tmp_path):
    path = write_random_checkpoint(tmp_path / "experts", "glm4_moe", expert_intermediate=12)
    weights, name = read_weights(path), "model.layers.1.mlp.shared_experts."
    config = read_config(path) | {"n_shared_experts": 2}
    parts = server_parts(weights, Shard(kv_heads=2, channels=64), config, dtype=torch.float32, drafter=None)
    (down,), gate_up = parts[f"{name}down_proj.weight"], parts[f"{name}gate_up_proj.weight"]
    assert torch.equal(down[:, :12], weights[f"{name}down_proj.weight"])
    assert down.shape == (32, 128) and not down[:, 12:].any()
    assert [len(part) for part in gate_up] == [128, 128]


# What SGLang's parameters are called: written out, since the tables of `rlpipe/models` are what is tested.
LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.qkv_proj.weight",
    "self_attn.qkv_proj.bias",
    "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
}
DRAFT = {"token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"}
SHARED = {"model.embed_tokens.weight", "lm_head.weight"}
SERVED = SHARED | {"model.norm.weight"} | {f"model.layers.0.{name}" for name in LAYER}
SERVED |= {f"draft.{name}" for name in SHARED} | {f"draft.model.{name}" for name in DRAFT}
SERVED |= {f"draft.model.mtp_block.{name}" for name in LAYER}


def test_every_tensor_has_the_name_that_the_server_gives_it(weights):
    assert tensors(weights).keys() == SERVED


@pytest.mark.parametrize("table", ["layer", "draft"])
def test_a_wrong_served_name_in_a_familys_table_is_caught(weights, monkeypatch, table):
    """Each row of the table in turn: it differs from what the server holds, under both names."""
    family, served = FAMILIES["mimo"], dict.fromkeys(SERVED, "0")
    for place, part in enumerate(getattr(family, table)):
        parts = list(getattr(family, table))
        parts[place] = dataclasses.replace(part, served=f"wrong.{part.served_name}")
        monkeypatch.setitem(FAMILIES, "mimo", dataclasses.replace(family, **{table: tuple(parts)}))
        report = compare(dict.fromkeys(tensors(weights), "0"), served)
        exists = any(name.endswith(part.served_name) for name in SERVED)
        assert report.passed is not exists
        if exists:
            assert any("wrong." in name for name in report.draft)
            assert any(name.endswith(f".{part.served_name}") and "wrong" not in name for name in report.draft)


def test_a_tensor_that_no_table_maps_is_named(weights):
    unknown = "model.layers.0.self_attn.o_proj.bias"
    with pytest.raises(ValueError, match=rf"No table maps where .* keeps {unknown}: add it to the family"):
        tensors(weights | {unknown: torch.zeros(32)})
    with pytest.raises(ValueError, match=r"keeps model\.layers\.1\.mlp\.down_proj\.weight:"):
        tensors(weights | {"model.layers.1.mlp.down_proj.weight": torch.zeros(32, 64)})


def test_part_of_a_fused_tensor_alone_is_refused(weights):
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=rf"qkv_proj.weight is made of .*\['{name}'\] are not sent"):
        tensors({other: tensor for other, tensor in weights.items() if other != name})


def test_the_experts_of_a_layer_are_two_tensors_cut_along_their_channels(tmp_path):
    weights = read_weights(write_random_checkpoint(tmp_path, "qwen3_moe", layers=1))
    changed = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    changed |= {"moe_intermediate_size": 12}
    names = ("gate_proj", "up_proj", "down_proj")
    experts = [
        [weights[f"model.layers.0.mlp.experts.{index}.{name}.weight"] for name in names] for index in range(8)
    ]
    for rank in range(2):
        found = tensors(weights, Shard(rank=rank, size=2, kv_heads=2), drafter=None, **changed)
        w13 = torch.stack([torch.cat([g.chunk(2)[rank], u.chunk(2)[rank]]) for g, u, _ in experts])
        w2 = torch.stack([down.chunk(2, dim=1)[rank] for *_, down in experts])
        assert torch.equal(found["model.layers.0.mlp.experts.w13_weight"].view(8, 12, 32), w13)
        assert torch.equal(found["model.layers.0.mlp.experts.w2_weight"].view(8, 32, 6), w2)
        assert torch.equal(found["model.layers.0.mlp.gate.weight"], weights["model.layers.0.mlp.gate.weight"])
    del weights["model.layers.0.mlp.experts.7.up_proj.weight"]
    with pytest.raises(ValueError, match=r"w13_weight is made of .*not sent"):
        tensors(weights, drafter=None, **changed)


# What SGLang's glm4_moe.py and glm4_moe_nextn.py call a layer with experts, and the draft's own weights.
GLM_MIXTURE = {f"mlp.{n}" for n in ("gate.weight", "gate.e_score_correction_bias", "experts.w13_weight")}
GLM_MIXTURE |= {f"mlp.{n}" for n in ("experts.w2_weight", "shared_experts.gate_up_proj.weight")}
GLM_MIXTURE |= {"mlp.shared_experts.down_proj.weight"}
GLM_DRAFT = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}


def test_every_tensor_of_glm_has_the_name_and_the_type_that_the_server_gives_it(tmp_path):
    path = write_random_checkpoint(tmp_path, "glm4_moe", vocab=100)
    parts = server_parts(
        read_weights(path),
        Shard(kv_heads=2),
        read_config(path),
        dtype=torch.bfloat16,
        drafter=Drafter.MTP,
    )
    dense = LAYER | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    mixed = {name for name in dense if not name.startswith("mlp.")} | GLM_MIXTURE
    names = SHARED | {"model.norm.weight"} | {f"draft.{name}" for name in SHARED}
    names |= {f"model.layers.0.{n}" for n in dense} | {f"model.layers.1.{n}" for n in mixed}
    names |= {f"draft.model.{n}" for n in GLM_DRAFT} | {f"draft.model.decoder.{n}" for n in mixed}
    assert parts.keys() == names
    for name, pieces in parts.items():
        expected = torch.float32 if ".mlp.gate." in name else torch.bfloat16
        assert {piece.dtype for piece in pieces} == {expected}, name


# What SGLang's deepseek_v2.py and deepseek_nextn.py call latent attention, with and without latent queries.
LATENT = {f"self_attn.{n}.weight" for n in ("kv_a_layernorm", "kv_b_proj", "o_proj")}
LATENT_QUERIES = {
    16: {f"self_attn.{n}.weight" for n in ("fused_qkv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj")},
    None: {f"self_attn.{n}.weight" for n in ("kv_a_proj_with_mqa", "q_proj")},
}


@pytest.mark.parametrize("query_rank", LATENT_QUERIES)
def test_every_tensor_of_deepseek_has_the_name_and_the_shard_that_the_server_gives_it(tmp_path, query_rank):
    path = write_random_checkpoint(tmp_path, "deepseek_v3", vocab=100, query_rank=query_rank)
    weights, config = read_weights(path), read_config(path)
    ranks = [
        server_parts(
            weights, Shard(rank=r, size=2, kv_heads=4), config, dtype=torch.bfloat16, drafter=Drafter.MTP
        )
        for r in range(2)
    ]
    layer = LATENT | LATENT_QUERIES[query_rank]
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    dense = layer | {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    mixed = layer | GLM_MIXTURE
    names = SHARED | {"model.norm.weight"} | {f"draft.{name}" for name in SHARED}
    names |= {f"model.layers.0.{n}" for n in dense} | {f"model.layers.1.{n}" for n in mixed}
    names |= {f"draft.model.{n}" for n in GLM_DRAFT} | {f"draft.model.decoder.{n}" for n in mixed}
    assert ranks[0].keys() == names
    place = "model.layers.1.self_attn."
    kv_b = [torch.cat(tuple(parts[f"{place}kv_b_proj.weight"])) for parts in ranks]
    assert torch.equal(torch.cat(kv_b), weights[f"{place}kv_b_proj.weight"].bfloat16())  # half the heads each
    if query_rank:
        fused = [torch.cat(tuple(parts[f"{place}fused_qkv_a_proj_with_mqa.weight"])) for parts in ranks]
        whole = [weights[f"{place}{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")]
        assert all(torch.equal(one, torch.cat(whole).bfloat16()) for one in fused)


EAGLE3 = {"lm_head.weight", "model.embed_tokens.weight", "model.fc.weight", "model.norm.weight"}
EAGLE3 |= {f"model.layers.0.{name}" for name in LAYER - {"self_attn.qkv_proj.bias"}}
EAGLE3 |= {"model.layers.0.hidden_norm.weight"}


def test_every_tensor_of_an_eagle3_draft_has_the_name_that_the_server_gives_it(tmp_path):
    target = write_random_checkpoint(tmp_path / "target", vocab=100, layers=1, tie=True)
    draft = random_draft(target, layers=[0], ids=range(70)).state_dict()
    weights = read_weights(target) | {f"eagle3.{name}": tensor for name, tensor in draft.items()}
    found = tensors(weights, drafter=Drafter.EAGLE3, tie_word_embeddings=True)
    served = {f"draft.{name}" for name in EAGLE3}
    assert {name for name in found if name.startswith("draft.")} == served
    assert found.keys() - served == {name for name in SERVED - {"lm_head.weight"} if "draft" not in name}
    assert torch.equal(found["draft.model.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["draft.lm_head.weight"][:70], draft["lm_head.weight"])
    assert len(found["draft.lm_head.weight"]) == 128 and not found["draft.lm_head.weight"][70:].any()
    fused = torch.cat([draft[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(found["draft.model.layers.0.self_attn.qkv_proj.weight"], fused)


def test_of_several_mtp_layers_only_the_first_is_served(weights):
    second = {name.replace("mtp_layers.0", "mtp_layers.1"): tensor for name, tensor in weights.items()}
    assert tensors(weights | second).keys() == SERVED
