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
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


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
        repeats = heads // key.shape[2]
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=2)
            value = value.repeat_interleave(repeats, dim=2)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)


def block_specs(config: TransformerConfig, te: bool) -> tuple[Any, Any]:
    """Specs of the decoder and of the MTP block (None without one)."""
    if te:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    decoder = TransformerBlockSubmodules(
        layer_specs=[layer] * config.num_layers, layer_norm=TENorm if te else WrappedTorchNorm
    )
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=te) if config.mtp_num_layers else None
    return decoder, mtp
