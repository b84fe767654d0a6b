"""DeepSeek-V3, V3.1, R1 and Moonlight: latent attention, grouped MoE with sigmoid scores, one MTP layer.

Attention caches one latent vector per token (`LatentAttention`). The MoE is GLM-4.5's (`glm4_moe`), except
that experts are in groups: a token first chooses groups, and then experts within them. RL does not train the
bias that is used to choose. The MTP layer is a decoder layer with experts, named `model.layers.N` in files;
its copies of embedding and head are not read.
"""

from collections.abc import Mapping
from typing import Any

from rlpipe.models import glm4_moe
from rlpipe.models.base import DENSE_LAYER, Experts, Family, refuse, whole_number
from rlpipe.models.latent import LatentAttention

RELEASED = "a DeepSeek-V3, V3.1, R1 or Moonlight"
DEFAULTS = {  # from transformers' DeepseekV3Config, used if config.json omits them
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_GROUPED = ("self_attention.linear_", "self_attention.q_", "self_attention.k_")
LAYER = tuple(part for part in DENSE_LAYER if not part.megatron[0].startswith(_GROUPED))


def read_experts(config: Mapping[str, Any]) -> Experts:
    """Read the MoE settings of a config.json. Raises ValueError for settings that are not supported."""
    expected = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"The model's config.json asks for {name}={config[name]!r}, and only {value!r} is "
                f"supported: use {RELEASED}."
            )
    return glm4_moe.read_experts({**DEFAULTS, **config}, RELEASED, grouped=True)


def read_latent(config: Mapping[str, Any]) -> LatentAttention:
    """Read the latent attention of a config.json. Raises ValueError for settings that are not supported."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, plain, rotary, value = (whole_number(name, config.get(name)) for name in names)
    query_rank = whole_number("q_lora_rank", config["q_lora_rank"]) if config.get("q_lora_rank") else 0
    refused = {
        "attention_bias=true": bool(config.get("attention_bias")),
        f"qk_rope_head_dim={rotary}, an odd number": rotary % 2 != 0,
        f"kv_lora_rank={kv_rank}, an odd number": kv_rank % 2 != 0,
        f"v_head_dim={value} above qk_nope_head_dim + qk_rope_head_dim = {plain + rotary}": value
        > plain + rotary,
    }
    refuse(
        refused,
        f"use {RELEASED} as released.",
    )
    return LatentAttention(
        query_rank=query_rank,
        kv_rank=kv_rank,
        plain=plain,
        rotary=rotary,
        value=value,
        interleaved=bool(config.get("rope_interleave", True)),
    )


FAMILY = Family(
    name="deepseek_v3",
    output_bias=False,
    layer=LAYER,
    draft=glm4_moe.DRAFT,
    experts=read_experts,
    latent=read_latent,
    draft_block="decoder",
    draft_on_cpu=False,  # set_embed_and_head of SGLang 0.5.23 waits for CUDA
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
)
