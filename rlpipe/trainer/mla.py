"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, Section 2.1) for the local layers.

    c_q = norm(W_qa h)      q_i = [W_qb c_q]_i, its last part rotated     (q_i = [W_q h]_i without query_rank)
    c, k_R = W_kva h        k_i = [W_kb norm(c)]_i with the rotated k_R, v_i = [W_vb norm(c)]_i

Modules, shards and checkpoints are the same as in Megatron's `MLASelfAttention`. The forward pass is replaced
for two reasons. Megatron's pass supports only the positions 0, 1, 2, .... And under tensor parallelism, with
the local layers, it loses a part of the gradient of k_R, as no collective sums the gradients from the heads
of each rank. Here keys and values are expanded, so attention over branches, windows and context parallel
ranks works as in the other model families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from rlpipe.models.latent import LatentAttention
from rlpipe.trainer.fused import RmsNorm

if TYPE_CHECKING:
    from rlpipe.models.base import Architecture

# Megatron 0.16.1 wrongly infers from its wrappers, which may be mocks, that TransformerEngine is installed.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


class LatentConfig(MLATransformerConfig):
    """Megatron's settings of latent attention; the model still makes the rotary embeddings.

    latent: dimensions of the latent attention. magnitude: factor of rotated queries and keys.
    """

    latent: LatentAttention
    magnitude: float


def latent_config(arch: Architecture, **settings: Any) -> LatentConfig:
    """Return Megatron's settings of a model with latent attention. settings: shared by all models."""
    latent = arch.latent

    # With multi_latent_attention set, Megatron's model would make no rotary embedding.
    config = LatentConfig(
        **settings,
        multi_latent_attention=False,
        rope_type="rope",
        q_lora_rank=latent.query_rank or None,  # pyright: ignore[reportArgumentType]  # None means without
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.plain,
        qk_pos_emb_head_dim=latent.rotary,
        v_head_dim=latent.value,
    )
    config.latent, config.magnitude = latent, arch.rope.magnitude
    return config


class LatentSelfAttention(MLASelfAttention):
    """Latent attention with Megatron's modules, for tokens at any positions."""

    config: LatentConfig
    q_layernorm: RmsNorm
    kv_layernorm: RmsNorm

    def __init__(self, config: LatentConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)

        # The model's rotary embedding is passed to `forward`.
        self.rotary_pos_emb = None
        self.core_attention.scale = config.softmax_scale
        self.kv_layernorm.eps = config.latent.norm_eps
        if config.q_lora_rank:
            self.q_layernorm.eps = config.latent.norm_eps

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Any = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Map [S, B, H] to [S, B, H]; rotary_pos_emb: [S, 1, 1, rotary]."""
        query, key, value = self.expanded(hidden_states, rotary_pos_emb)

        # Kernels and layouts require keys and values of one size: pad values with zeros, then cut them off.
        padded = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        attended = self.core_attention(query, key, padded, None, packed_seq_params=packed_seq_params)
        attended = attended.unflatten(-1, query.shape[-2:])[..., : value.shape[-1]].flatten(-2)
        return self.linear_proj(attended)

    def expanded(
        self, hidden_states: torch.Tensor, rotary_pos_emb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute this rank's queries and keys [S, B, heads, plain + rotary], values [S, B, heads, value]."""
        latent, heads = self.config.latent, self.num_attention_heads_per_partition

        if latent.query_rank:
            compressed = self.q_layernorm(self._gathered(self.linear_q_down_proj, hidden_states))
            query, _ = self.linear_q_up_proj(compressed)
        else:
            query, _ = self.linear_q_proj(hidden_states)

        # One projection makes the compressed keys and values, and the rotated part that all heads share.
        compressed, shared = self._gathered(self.linear_kv_down_proj, hidden_states).split(
            [latent.kv_rank, latent.rotary], -1
        )
        keys_values, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        key, value = keys_values.unflatten(-1, (heads, -1)).split([latent.plain, latent.value], -1)
        query, turned = query.unflatten(-1, (heads, -1)).split([latent.plain, latent.rotary], -1)

        # The heads of each rank contribute a part of the gradient of the shared keys: sum it over ranks.
        sequence = self.config.sequence_parallel
        spread = gather_from_sequence_parallel_region if sequence else copy_to_tensor_model_parallel_region
        shared = spread(shared, group=self.tp_group)[..., None, :]

        turned, shared = (self._rotated(x, rotary_pos_emb) for x in (turned, shared))
        key = torch.cat([key, shared.expand(-1, -1, heads, -1)], -1)
        return torch.cat([query, turned], -1), key, value

    def _gathered(self, linear: Callable[..., Any], hidden_states: torch.Tensor) -> torch.Tensor:
        """Gather the full output of a layer that is cut by rows over ranks, for the tokens of this rank."""
        shard = linear(hidden_states)[0]
        if self.config.sequence_parallel:
            return all_to_all_hp2sp(shard, self.tp_group).unflatten(0, (-1, shard.shape[1]))
        return gather_from_tensor_model_parallel_region(shard, group=self.tp_group)

    def _rotated(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
        """Rotate x [S, B, heads, rotary]; interleaved pairs are first reordered into two halves."""
        config = self.config
        return _apply_rotary_pos_emb_bshd(
            x,
            rotary_pos_emb,
            multi_latent_attention=config.latent.interleaved,
            mscale=config.magnitude,
        )


def latent_layer(layer: ModuleSpec, norm: type, core: type) -> ModuleSpec:
    """Replace a decoder layer's attention by latent attention."""
    latent = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")

    # Megatron types the parts of a spec as `object`.
    attention = cast("ModuleSpec", cast("TransformerLayerSubmodules", latent.submodules).self_attention)
    attention.module = LatentSelfAttention
    parts = cast("MLASelfAttentionSubmodules", attention.submodules)
    parts.q_layernorm = parts.kv_layernorm = norm
    parts.core_attention = core

    cast("TransformerLayerSubmodules", layer.submodules).self_attention = attention
    return layer
