"""Random Hugging Face checkpoints for tests: real layout, tiny sizes, nothing zero or one by chance.

Owns writing them; every norm weight and bias is random too, so a forgotten one shows up. The
"mimo" family is a Qwen2 backbone plus one MTP layer (see `rlpipe/models/checkpoint.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_hybrid import write_random_hybrid

ARCHITECTURES = {
    "mimo": ("qwen2", "MiMoForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
}

SCALED = {  # rotary embeddings of every scaling, as a config.json says them; contexts beyond 16 are stretched
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5},
}
for _kind, _settings in SCALED.items():
    _settings |= {"rope_type": _kind, "rope_theta": 1e4, "original_max_position_embeddings": 16}

# scores are scaled by mscale_all_dim, rotated queries and keys by what mscale has more
DEEPSEEK_YARN = SCALED["yarn"] | {"mscale": 2.0, "mscale_all_dim": 1.0}


def write_random_checkpoint(
    path: str | Path,
    family: str = "mimo",
    *,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    max_position: int = 512,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.15,
    head_scale: float | None = None,
    rope_parameters: dict[str, Any] | None = None,
    mtp_layers: int = 1,
    normed: bool = True,
    experts: int = 8,
    expert_intermediate: int = 12,
    qk_norm: bool = True,
    query_rank: int | None = 20,
    groups: int = 2,
    interleaved: bool = True,
    key_heads: int = 2,
    seed: int = 0,
) -> Path:
    """Write config.json and model.safetensors into `path` (made if missing) and return it.

    scale: standard deviation of the matrices; head_scale: of lm_head (None: scale), larger makes
    the next-token distribution sharper. mtp_layers: of the mimo family, one per depth if several.
    normed: whether the weights of a token's experts (2 of `experts`, of the qwen3_moe family) sum to 1;
    expert_intermediate: channels of one. qk_norm: of the glm4_moe family, whose first layer is dense, as that
    of deepseek_v3 is; of this, query_rank: `q_lora_rank`, groups of experts, of which a token reads one,
    interleaved: whether neighbours are rotated together. key_heads: of delta nets, with two value heads each.
    bos is 0 and eos is 1. There is no tokenizer.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // heads
    intermediate = intermediate or 2 * hidden
    model_type, architecture = ARCHITECTURES[family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if family.startswith(("qwen3_next", "qwen3_5")):
        sizes = {"scale": scale, "head_scale": head_scale or scale, "mtp_layers": mtp_layers, "seed": seed}
        sizes |= {"expert_intermediate": expert_intermediate, "key_heads": key_heads}
        write_random_hybrid(path, config, dtype=dtype, **sizes)
        return path
    if family == "mistral":
        config["sliding_window"] = None
    glm, latent = family == "glm4_moe", family == "deepseek_v3"
    shared = glm or latent
    experts = experts if family == "qwen3_moe" or shared else 0
    if shared:
        config |= {"n_routed_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": expert_intermediate, "n_shared_experts": 1, "n_group": 1}
        config |= {"topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    if glm:
        config |= {"attention_bias": True, "use_qk_norm": qk_norm, "partial_rotary_factor": 0.5}
    elif latent:
        del config["head_dim"]  # transformers means the rotated part by it
        config |= {"num_key_value_heads": heads, "n_group": groups, "attention_bias": False}
        config |= {"q_lora_rank": query_rank, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        config |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "topk_method": "noaux_tc"}
        config |= {"scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_interleave": interleaved}
    elif experts:
        config |= {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": normed}
        config |= {
            "moe_intermediate_size": expert_intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        config |= {"router_aux_loss_coef": 0.001}
    if family == "mimo" or shared:
        config["num_nextn_predict_layers"] = mtp_layers
    (path / "config.json").write_text(json.dumps(config, indent=1))

    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, std: float = scale) -> None:
        weights[name] = torch.randn(rows, columns, generator=generator) * std

    def vector(name: str, size: int, mean: float) -> None:
        weights[name] = mean + 0.1 * torch.randn(size, generator=generator)

    def latent_attention(prefix: str) -> None:
        reads = hidden
        if query_rank:
            matrix(f"{prefix}q_a_proj.weight", query_rank, hidden)
            vector(f"{prefix}q_a_layernorm.weight", query_rank, 1.0)
            reads = query_rank
        matrix(f"{prefix}{'q_b_proj' if query_rank else 'q_proj'}.weight", heads * (8 + 4), reads)
        matrix(f"{prefix}kv_a_proj_with_mqa.weight", 16 + 4, hidden)
        vector(f"{prefix}kv_a_layernorm.weight", 16, 1.0)
        matrix(f"{prefix}kv_b_proj.weight", heads * (8 + 6), 16)
        matrix(f"{prefix}o_proj.weight", hidden, heads * 6)

    def grouped_attention(prefix: str) -> None:
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{prefix}{name}_proj.weight", size * head_dim, hidden)
            if model_type == "qwen2" or glm:
                vector(f"{prefix}{name}_proj.bias", size * head_dim, 0.0)
        if model_type.startswith("qwen3") or (glm and qk_norm):
            vector(f"{prefix}q_norm.weight", head_dim, 1.0)
            vector(f"{prefix}k_norm.weight", head_dim, 1.0)
        matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim)

    def decoder_layer(prefix: str, dense: bool = False) -> None:
        (latent_attention if latent else grouped_attention)(f"{prefix}self_attn.")
        mixed = bool(experts) and not dense
        if mixed:
            matrix(f"{prefix}mlp.gate.weight", experts, hidden)
        inner = expert_intermediate if mixed else intermediate
        mlps = [f"mlp.experts.{index}" for index in range(experts)] if mixed else ["mlp"]
        if shared and mixed:
            vector(f"{prefix}mlp.gate.e_score_correction_bias", experts, 0.0)
            mlps.append("mlp.shared_experts")
        for mlp in mlps:
            matrix(f"{prefix}{mlp}.gate_proj.weight", inner, hidden)
            matrix(f"{prefix}{mlp}.up_proj.weight", inner, hidden)
            matrix(f"{prefix}{mlp}.down_proj.weight", hidden, inner)
        vector(f"{prefix}input_layernorm.weight", hidden, 1.0)
        vector(f"{prefix}post_attention_layernorm.weight", hidden, 1.0)

    matrix("model.embed_tokens.weight", vocab, hidden, 1.0)
    for index in range(layers):
        decoder_layer(f"model.layers.{index}.", dense=shared and index == 0)
    vector("model.norm.weight", hidden, 1.0)
    if not tie:
        matrix("lm_head.weight", vocab, hidden, head_scale or scale)
    if family == "mimo":
        for index in range(mtp_layers):
            prefix = f"model.mtp_layers.{index}."
            decoder_layer(prefix)
            matrix(f"{prefix}input_proj.weight", hidden, 2 * hidden)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                vector(f"{prefix}{name}.weight", hidden, 1.0)
    if shared and mtp_layers:
        prefix = f"model.layers.{layers}."
        decoder_layer(prefix)
        matrix(f"{prefix}eh_proj.weight", hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            vector(f"{prefix}{name}.weight", hidden, 1.0)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
