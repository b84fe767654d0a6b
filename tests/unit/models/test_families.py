"""What the families read from a config.json, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.models import FAMILIES, family_of, read_architecture
from rlpipe.models.checkpoint import (
    check_weights,
    read_config,
    read_weights,
    weight_shapes,
    write_checkpoint,
)
from rlpipe.preflight.memory_estimate import parameters
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit

DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 512,
}
MIMO_7B = {  # config.json of XiaomiMiMo/MiMo-7B-RL
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


EXPERTS = {  # of Qwen/Qwen3-30B-A3B; families without experts do not read them
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": None,
    "n_routed_experts": 128,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 48,
    "n_group": 1,
}
LATENT = {  # of deepseek-ai/DeepSeek-V3; families with grouped queries do not read them
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DENSE_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported. Use .* llama, .*qwen3"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4}}, "rope scaling of type 'longrope'"),
        ({"rope_parameters": {"type": "dynamic", "factor": 4}}, "rope scaling of type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "'linear' with factor=None"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'llama3' with high_freq_factor=None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -4}}, "factor=-4: it must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(tmp_path, change, message):
    config = read_config(write_random_checkpoint(tmp_path)) | change
    with pytest.raises(ValueError, match=message):
        read_architecture(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2.*not supported: use a Qwen3-MoE whose layers"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 with experts.*spec.mode=none"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_experts=8"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob"),
        ({"num_experts": None}, "num_experts=None: it must be a whole number"),
        ({"moe_intermediate_size": 1.5}, "moe_intermediate_size=1.5: it must be a whole number"),
        ({"use_sliding_window": True}, "sliding-window attention"),
    ],
)
def test_mixtures_that_would_be_computed_wrongly_are_refused(tmp_path, change, message):
    config = read_config(write_random_checkpoint(tmp_path, "qwen3_moe"))
    assert read_architecture(config).experts.count == 8
    with pytest.raises(ValueError, match=message):
        read_architecture(config | change)


def test_the_released_qwen3_30b_a3b_is_counted_with_all_its_experts():
    released = EXPERTS | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    model, draft = parameters(read_architecture(released))
    assert model == pytest.approx(30.53e9, rel=1e-3) and not draft


GLM_4_5_AIR = {  # config.json of zai-org/GLM-4.5-Air, what is read of it
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_the_released_glm_4_5_air_is_read_as_it_was_published():
    arch = read_architecture(GLM_4_5_AIR)
    assert (arch.rotary_dim, arch.head_dim, arch.experts.dense, arch.experts.shared) == (64, 128, 1, 1408)
    assert arch.qkv_bias and not arch.output_bias and not arch.qk_norm and arch.mtp_layers == 1
    model, draft = parameters(arch)
    assert model == pytest.approx(106.8e9, rel=2e-3) and draft == pytest.approx(2.4e9, rel=5e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 8}, "n_group=8, which is not supported: use a GLM-4.5"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129 of n_routed_experts=128"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2.*at most one MTP layer"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace=46 of num_hidden_layers=46"),
        ({"n_routed_experts": None}, "n_routed_experts=None: it must be a whole number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of 0.5 of a head"),
    ],
)
def test_what_of_glm_would_be_computed_wrongly_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(GLM_4_5_AIR | change)


DEEPSEEK_V3 = (
    LATENT
    | {  # config.json of deepseek-ai/DeepSeek-V3, what is read of it, less quantization_config
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    }
)


def test_the_released_deepseek_v3_is_read_as_it_was_published():
    arch = read_architecture(DEEPSEEK_V3)
    assert (arch.head_dim, arch.rotary_dim, arch.kv_heads, arch.max_position) == (192, 64, 128, 163840)
    assert (arch.experts.groups, arch.experts.groups_per_token, arch.experts.dense) == (8, 4, 3)
    assert arch.rope.magnitude == 1 and arch.latent.interleaved
    assert arch.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    model, draft = parameters(arch)
    assert model == pytest.approx(671.0e9, rel=1e-3) and draft == pytest.approx(11.5e9, rel=1e-2)


MOONLIGHT = DEEPSEEK_V3 | {  # what differs in config.json of moonshotai/Moonlight-16B-A3B
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}


def test_the_released_moonlight_is_counted_with_all_its_experts():
    model, draft = parameters(read_architecture(MOONLIGHT))
    assert model == pytest.approx(15.96e9, rel=1e-3) and not draft


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config .'fp8'.*Convert them to bf",
        ),
        ({"attention_bias": True}, "attention_bias=true, which is not supported: use a DeepSeek-V3"),
        ({"v_head_dim": 256}, "v_head_dim=256 above qk_nope_head_dim . qk_rope_head_dim = 192"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim=33, an odd number"),
        ({"kv_lora_rank": 511}, "kv_lora_rank=511, an odd number"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None: it must be a whole number"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax', and only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"topk_group": 8}, "topk_group=8 of n_group=8 with num_experts_per_tok=8"),
        ({"n_group": 7}, "n_group=7 of n_routed_experts=256"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2.*at most one MTP layer"),
    ],
)
def test_what_of_deepseek_would_be_computed_wrongly_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(DEEPSEEK_V3 | change)


def test_an_mtp_layer_that_is_numbered_after_the_others_comes_back_under_that_name(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "glm4_moe")
    stored = load_file(path / "model.safetensors")
    assert "model.layers.2.enorm.weight" in stored
    copies = {f"model.layers.2.{n}.weight": torch.zeros(64, 32) for n in ("embed_tokens", "shared_head.head")}
    save_file(stored | copies, path / "model.safetensors")  # as in released files; they are not read
    weights = read_weights(path)
    assert not any(name.startswith("model.layers.2.") for name in weights)
    assert {name: tuple(w.shape) for name, w in weights.items()} == weight_shapes(path)
    write_checkpoint(tmp_path / "written", weights, like=path)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("sliding_window", [{}, {"sliding_window": 4096}])
def test_mistral_with_a_sliding_window_is_refused(tmp_path, sliding_window):
    config = read_config(write_random_checkpoint(tmp_path, "mistral"))
    assert read_architecture(config).family == "mistral"
    del config["sliding_window"]
    with pytest.raises(ValueError, match="sliding-window attention"):
        read_architecture(config | sliding_window)


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_weights_are_those_of_the_checkpoint(tmp_path, family):
    path = write_random_checkpoint(tmp_path, family, head_dim=16)
    arch = read_architecture(read_config(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in read_weights(path).items()}
    assert arch.weight_shapes(mtp=bool(arch.mtp_layers)) == shapes


@pytest.mark.parametrize("query_rank", [None, 1536])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_a_layer_stands_in_the_familys_table_once(name, query_rank):
    """The shapes are derived from the dimensions, the table is by hand: both name the same weights."""
    family, sizes = FAMILIES[name], EXPERTS | LATENT | DELTA | {"q_lora_rank": query_rank}
    config = MIMO_7B | sizes | {"model_type": name, "sliding_window": None}
    if family.latent or family.delta:
        config["attention_bias"] = False
    arch = read_architecture(config)
    arch = dataclasses.replace(arch, layers=1, qk_norm=not family.latent, mtp_layers=1)
    if family.delta:
        kinds = dataclasses.replace(arch.delta, linear=(True, False))
        arch = dataclasses.replace(arch, layers=2, delta=kinds)
    shapes = arch.weight_shapes(mtp=True)
    listed = [n for part in family.layer_parts(sizes) for n in part.hf]
    if family.experts:  # every layer has them
        listed = [n for n in listed if not n.startswith(DENSE_MLP)]
    layer = {n.split(".", 3)[3] for n in shapes if n.startswith("model.layers.")}
    assert len(listed) == len(set(listed)) and layer - {"self_attn.o_proj.bias"} == {
        n for n in listed if arch.qkv_bias or not n.endswith(".bias")
    }
    draft = {n.removeprefix("model.mtp_layers.0.") for n in shapes if n.startswith("model.mtp_layers.")}
    assert draft - layer == {n for part in family.draft for n in part.hf}


def test_the_released_mimo_7b_is_read_as_it_was_published():
    arch = read_architecture(MIMO_7B)
    assert (arch.hidden, arch.layers, arch.heads, arch.kv_heads, arch.head_dim) == (4096, 36, 32, 8, 128)
    assert (arch.rope.theta, arch.norm_eps, arch.vocab) == (640000.0, 1e-5, 151680)
    assert arch.qkv_bias and not arch.output_bias and not arch.qk_norm and arch.mtp_layers == 1
    parameters = sum(torch.Size(shape).numel() for shape in arch.weight_shapes(mtp=True).values())
    assert parameters == pytest.approx(7.83e9, rel=1e-3)


def test_a_family_is_found_by_its_file():
    assert {"qwen2", "qwen3", "llama", "mimo"} <= FAMILIES.keys()
    assert all(family_of({"model_type": name}).name == name for name in FAMILIES)


def test_missing_unknown_and_misshapen_weights_are_named():
    expected = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1,)}
    weights = {"a.weight": torch.zeros(3, 2), "x.weight": torch.zeros(1), "c.weight": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        check_weights(weights, expected, frozenset())
    assert "missing b.weight" in str(error.value)
    assert "unknown x.weight" in str(error.value)
    assert "wrong shape a.weight (3, 2) instead of (2, 3)" in str(error.value)
    check_weights(
        {"a.weight": torch.zeros(2, 3), "c.weight": torch.zeros(1)}, expected, frozenset({"b.weight"})
    )
