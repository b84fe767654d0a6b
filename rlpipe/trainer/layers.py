"""Layer parts of the local (no TransformerEngine) spec: attention and the layer recipe.

Megatron's own `DotProductAttention` writes out the [S, S] scores; torch's fused kernel does not.
Rows are padded on the right, so a causal kernel needs no mask: a pad is only ever seen by pads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlpipe.trainer.fused import RmsNorm, SwiGluMLP


class CausalAttention(MegatronModule):
    """softmax(Q K^T / sqrt(d)) V with a causal mask, grouped queries, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **_: Any
    ) -> torch.Tensor:
        """query [S, B, heads, d], key and value [S, B, groups, d] -> [S, B, heads * d]."""
        seq, batch, heads, _ = query.shape
        context = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
            is_causal=True,
            scale=self.scale,
            enable_gqa=heads != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)


def block_specs(config: TransformerConfig, te: bool) -> tuple[Any, Any]:
    """Specs of the decoder and of the MTP block (None without one)."""
    layer = (
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        if te
        else _local_layer(config.qk_layernorm)
    )
    norm = TENorm if te else RmsNorm
    decoder = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)
    if not config.mtp_num_layers:
        return decoder, None
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=te)
    for spec in mtp.layer_specs:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = norm
    return decoder, mtp


def _local_layer(qk_layernorm: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    parts.mlp = ModuleSpec(module=SwiGluMLP, submodules=parts.mlp.submodules)
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer
