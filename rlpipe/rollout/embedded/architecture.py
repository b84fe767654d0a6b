"""What the embedded engine can run: dimensions read from an HF config, and the weights it expects.

Owns the refusal of models it would compute wrongly; builds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.models.checkpoint import MTP_PREFIX, has_mtp

FAMILIES = ("qwen2", "qwen3", "llama", "mimo")


@dataclass(slots=True, kw_only=True, frozen=True)
class Architecture:
    """Dimensions of a dense decoder: pre-norm, RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    mtp: bool

    def weight_shapes(self, *, mtp: bool) -> dict[str, tuple[int, ...]]:
        """HF name -> shape of every weight, the draft's included when `mtp`."""
        shapes = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for index in range(self.layers):
            shapes.update(self._layer_shapes(f"model.layers.{index}."))
        if mtp:
            shapes.update(self._layer_shapes(MTP_PREFIX))
            shapes[f"{MTP_PREFIX}input_proj.weight"] = (self.hidden, 2 * self.hidden)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                shapes[f"{MTP_PREFIX}{name}.weight"] = (self.hidden,)
        return shapes

    def _layer_shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = (
            ("self_attn.q_proj", q, self.hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.o_proj", self.hidden, q, self.output_bias),
            ("mlp.gate_proj", self.intermediate, self.hidden, self.mlp_bias),
            ("mlp.up_proj", self.intermediate, self.hidden, self.mlp_bias),
            ("mlp.down_proj", self.hidden, self.intermediate, self.mlp_bias),
        )
        for name, rows, columns, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (self.hidden,)
        if self.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{name}.weight", (self.head_dim,)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Dimensions from the contents of a `config.json`.

    Raises ValueError for model families and options the engine does not compute.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model_type={family!r} is not supported by the embedded engine; it runs {', '.join(FAMILIES)}. "
            "Use a checkpoint of one of these families."
        )
    rope = config.get("rope_parameters") or {}
    _refuse_unsupported(config, rope)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    qwen2_like = family in ("qwen2", "mimo")
    attention_bias = bool(config.get("attention_bias", qwen2_like))
    return Architecture(
        family=family,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        max_position=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        qkv_bias=attention_bias,
        output_bias=attention_bias and not qwen2_like,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        mtp=has_mtp(config),
    )


def _refuse_unsupported(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    types = {rope.get("rope_type"), scaling.get("rope_type"), scaling.get("type")} - {None, "default"}
    factor = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    refused = {
        f"rope scaling of type {', '.join(map(repr, types))}": bool(types),
        f"partial_rotary_factor={factor}": factor != 1.0,
        "sliding-window attention (use_sliding_window=true)": bool(config.get("use_sliding_window")),
        f"hidden_act={config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
    }
    for what, present in refused.items():
        if present:
            raise ValueError(
                f"The model's config.json asks for {what}, which the embedded engine does not compute. "
                "Use a checkpoint without it."
            )


def check_weights(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
) -> None:
    """Names and shapes must be exactly those expected.

    optional: names that may be there or not. Raises ValueError naming what is missing, unknown or
    of a wrong shape.
    """
    problems = []
    if missing := sorted(expected.keys() - weights.keys() - optional):
        problems.append(f"missing {_some(missing)}")
    if unknown := sorted(weights.keys() - expected.keys() - optional):
        problems.append(f"unknown {_some(unknown)}")
    wrong = [
        f"{name} {tuple(weights[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    if wrong:
        problems.append(f"wrong shape {_some(wrong)}")
    if problems:
        raise ValueError(
            f"The weights do not fit the model: {'; '.join(problems)}. "
            "Send every weight of the checkpoint under its Hugging Face name."
        )


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
