"""Random checkpoints of Qwen3-Next and Qwen3.5 in the layout of the released files, for `tiny_checkpoint`.

Every second layer has attention. Qwen3-Next: two tensors of input projections, experts apart. Qwen3.5: four
tensors, text under `model.language_model` beside a piece of a vision tower, experts of a layer in one tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EXPERTS = 8
DELTA = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def write_random_hybrid(
    path: Path,
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    scale: float,
    head_scale: float,
    mtp_layers: int,
    expert_intermediate: int,
    key_heads: int,
    seed: int,
) -> None:
    """Write config.json and model.safetensors; config: what all families have."""
    family = config["model_type"]
    mixed = family in ("qwen3_next", "qwen3_5_moe")
    nested = family in ("qwen3_5", "qwen3_5_moe")
    value_heads = 2 * key_heads
    text = config | DELTA | {"partial_rotary_factor": 0.5, "full_attention_interval": 2}
    text |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    text["rope_parameters"] = config["rope_parameters"] | {"partial_rotary_factor": 0.5}
    if mixed:
        text |= {"num_experts": EXPERTS, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": expert_intermediate}
        text |= {"shared_expert_intermediate_size": 2 * expert_intermediate}
    if family == "qwen3_next":
        text |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        text["layer_types"] = [
            "full_attention" if (i + 1) % 2 == 0 else "linear_attention"
            for i in range(text["num_hidden_layers"])
        ]
        text["mtp_num_hidden_layers"] = mtp_layers
    if family == "qwen3_5_moe":
        del text["intermediate_size"]
    written = text
    if nested:
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        vision |= {
            "out_hidden_size": text["hidden_size"],
            "model_type": family,
            "num_position_embeddings": 16,
        }
        written = {name: text.pop(name) for name in ("architectures", "model_type")}
        written |= {"tie_word_embeddings": text["tie_word_embeddings"], "vision_config": vision}
        written["text_config"] = text | {"model_type": f"{family}_text"}
    (path / "config.json").write_text(json.dumps(written, indent=1))

    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    hidden, heads, kv_heads, head_dim = (
        text[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def matrix(name: str, *shape: int, std: float = scale) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * std

    def vector(name: str, size: int, mean: float = 0.0) -> None:
        weights[name] = mean + 0.1 * torch.randn(size, generator=generator)

    def mlp(prefix: str, inner: int) -> None:
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            matrix(f"{prefix}{name}_proj.weight", rows, columns)

    def attention(prefix: str) -> None:
        for name, size in (("q", 2 * heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{prefix}{name}_proj.weight", size * head_dim, hidden)
        matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim)
        for name in ("q_norm", "k_norm"):
            vector(f"{prefix}{name}.weight", head_dim)

    def delta_net(prefix: str) -> None:
        key_dim, value_dim, kernel = DELTA.values()
        keys, values = key_heads * key_dim, value_heads * value_dim
        apart = {"qkv": 2 * keys + values, "z": values, "b": value_heads, "a": value_heads}
        fused = {"qkvz": 2 * keys + 2 * values, "ba": 2 * value_heads}
        for name, rows in (fused if family == "qwen3_next" else apart).items():
            matrix(f"{prefix}in_proj_{name}.weight", rows, hidden, std=2 * scale)
        matrix(f"{prefix}conv1d.weight", 2 * keys + values, 1, kernel, std=0.5)
        weights[f"{prefix}A_log"] = torch.rand(value_heads, generator=generator).log()
        vector(f"{prefix}dt_bias", value_heads, 0.5)
        vector(f"{prefix}norm.weight", value_dim, 1.0)
        matrix(f"{prefix}out_proj.weight", hidden, values)

    def decoder_layer(prefix: str, linear: bool, fused: bool) -> None:
        (delta_net if linear else attention)(f"{prefix}{'linear_attn' if linear else 'self_attn'}.")
        if not mixed:
            mlp(f"{prefix}mlp.", text["intermediate_size"])
        else:
            matrix(f"{prefix}mlp.gate.weight", EXPERTS, hidden)
            matrix(f"{prefix}mlp.shared_expert_gate.weight", 1, hidden)
            mlp(f"{prefix}mlp.shared_expert.", 2 * expert_intermediate)
            if fused:
                matrix(f"{prefix}mlp.experts.gate_up_proj", EXPERTS, 2 * expert_intermediate, hidden)
                matrix(f"{prefix}mlp.experts.down_proj", EXPERTS, hidden, expert_intermediate)
            else:
                for index in range(EXPERTS):
                    mlp(f"{prefix}mlp.experts.{index}.", expert_intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            vector(f"{prefix}{name}.weight", hidden)

    body = "model.language_model." if nested else "model."
    matrix(f"{body}embed_tokens.weight", text["vocab_size"], hidden, std=1.0)
    for index in range(text["num_hidden_layers"]):
        decoder_layer(f"{body}layers.{index}.", (index + 1) % 2 != 0, fused=nested)
    vector(f"{body}norm.weight", hidden)
    if not text["tie_word_embeddings"]:
        matrix("lm_head.weight", text["vocab_size"], hidden, std=head_scale)
    if mtp_layers:
        decoder_layer("mtp.layers.0.", linear=False, fused=False)
        matrix("mtp.fc.weight", hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            vector(f"mtp.{name}.weight", hidden)
    if nested:
        matrix("model.visual.merger.norm.weight", 4)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
