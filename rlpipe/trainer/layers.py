"""Layer parts of the local (no TransformerEngine) spec: attention and the layer recipe.

Megatron's own `DotProductAttention` writes out the [S, S] scores; torch's fused kernel does not.
Tokens come flat, with a layout that tells who attends to whom (`BranchLayout` here, `continuation` for
windows that go on from a pass), or as rows padded on the right; those need no mask: a pad is only ever seen
by pads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlpipe.batching.micro_batch import Branch
from rlpipe.models.delta_net import DeltaNet
from rlpipe.trainer.attention import branch_attention, has_flash
from rlpipe.trainer.delta_net import GatedDeltaNet, Succession
from rlpipe.trainer.experts import MixtureOfExperts, Replay, ReplayingLayer, Router
from rlpipe.trainer.fused import RmsNorm, SwiGluMLP
from rlpipe.trainer.mla import LatentConfig, latent_layer


class BranchLayout(PackedSeqParams):
    """How branches lie in a flat micro-batch (see `rlpipe.batching.micro_batch`), on its way to attention.

    Megatron hands packed_seq_params down to core attention untouched, recomputation included; a
    qkv_format of its own keeps it from taking any of its THD paths.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        positions: torch.Tensor,
        keep: bool = False,
        replay: Replay | None = None,
    ) -> None:
        """positions: [N] int64, of each token in its trajectory. replay: the experts that read each token.

        keep: every attention leaves its keys and values here, until they are taken by `release`.
        """
        super().__init__(qkv_format="branches")
        self.branches, self.positions, self.replay = branches, positions, replay
        self.reach = max(branch.shared + branch.length for branch in branches)  # positions end before it
        self._kept: Kept | None = {} if keep else None

    @cached_property
    def succession(self) -> Succession:
        """Which tokens follow which, for delta nets."""
        return Succession(self.branches, self.positions.device)

    def attend(
        self, attention: CausalAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Each branch attends to its context, then causally to itself; all [1, heads, N, d]."""
        if self._kept is not None:
            self._kept[attention] = key, value
        return self.attend_to(attention, query, key, value)

    def attend_to(
        self,
        attention: CausalAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mine: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The same for the queries of some branches, by their indices (None: of all)."""
        if has_flash(query):
            return branch_attention(query, key, value, self.branches, attention.scale, mine)
        return self.attend_masked(attention, query, key, value, mine)

    def attend_masked(
        self,
        attention: CausalAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mine: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The same by one call for each branch with a mask [length, shared + length] where it has a context.

        For what no flash kernel takes (float32 on a GPU); memory grows with the square of the tokens.
        """
        lengths = [branch.length for branch in self.branches]
        mine = range(len(lengths)) if mine is None else mine
        keys, values = (x.split(lengths, dim=2) for x in (key, value))
        outputs = []
        for i, q in zip(mine, query.split([lengths[i] for i in mine], dim=2), strict=True):
            branch = self.branches[i]
            k, v = (
                torch.cat([*(x[j][:, :, :count] for j, count in branch.context), x[i]], dim=2)
                for x in (keys, values)
            )
            mask = None
            if branch.context:
                unseen = torch.full(
                    (branch.length, k.shape[2]), -torch.inf, dtype=query.dtype, device=query.device
                )
                mask = unseen.triu(branch.shared + 1)
            outputs.append(attention.attend(q, k, v, mask))
        return torch.cat(outputs, dim=2)

    def release(self) -> Kept:
        """Keys and values of the pass by attention; nothing is kept from here on (not by recomputation)."""
        kept, self._kept = self._kept, None
        return kept


class CausalAttention(MegatronModule):
    """softmax(Q K^T / sqrt(d)) V with a causal mask, grouped queries, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        # cuDNN's attention fails with additive masks over views (misaligned address), and ends the process
        torch.backends.cuda.enable_cudnn_sdp(False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """query [S, B, heads, d], key and value [S, B, groups, d] -> [S, B, heads * d].

        With a layout, whose `attend` says who attends to whom, B is 1 and S the flat tokens.
        """
        seq, batch, _, _ = query.shape
        heads_first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        if packed_seq_params is None:
            context = self.attend(*heads_first)
        else:
            context = packed_seq_params.attend(self, *heads_first)
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """query [B, heads, Q, d], keys, values [B, groups, S, d] -> as query. mask: added (None: causal)."""
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class GatedAttention(SelfAttention):
    """Megatron's attention with an output gate, which it compiles: seconds, and a C++ compiler, on a CPU."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate), both [S, B, width]."""
        if x.is_cuda:
            return super()._apply_output_gate(x, gate)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(wide).sigmoid()).to(x.dtype)


Kept = dict[CausalAttention, tuple[torch.Tensor, torch.Tensor]]  # keys and values [1, groups, N, d]


def block_specs(
    config: TransformerConfig, te: bool, dense: int = 0, delta: DeltaNet | None = None
) -> tuple[Any, Any]:
    """Specs of this pipeline stage's decoder layers and of its MTP block (None without one).

    dense: first layers of the model without experts. delta: delta nets in place of some layers' attention.
    """
    layer = _layer(config, config.num_moe_experts, te)
    decoder_layer = _replaying(layer) if config.num_moe_experts else layer
    layers = [_layer(config, None, te)] * dense + [decoder_layer] * (config.num_layers - dense)
    norm = TENorm if te else RmsNorm
    if delta is not None:
        linear = _layer(config, config.num_moe_experts, te)
        linear.submodules.input_layernorm = norm  # TransformerEngine fuses it into attention
        linear.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"delta": delta})
        linear = _replaying(linear) if config.num_moe_experts else linear
        layers = [linear if here else decoder_layer for here in delta.linear]
    first = get_transformer_layer_offset(config)
    layers = layers[first : first + get_num_layers_to_build(config)]
    decoder = TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
    if not config.mtp_num_layers:
        return decoder, None
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=te)
    if mtp is None:  # the last stage has it
        return decoder, None
    for spec in mtp.layer_specs:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = norm
    return decoder, mtp


def _layer(config: TransformerConfig, num_experts: int | None, te: bool) -> ModuleSpec:
    make = get_gpt_layer_with_transformer_engine_spec if te else _local_layer
    layer = make(qk_layernorm=config.qk_layernorm, num_experts=num_experts)
    if isinstance(config, LatentConfig):
        layer = latent_layer(layer, RmsNorm, CausalAttention)
    if config.attention_output_gate:
        layer.submodules.self_attention.module = GatedAttention
    if num_experts:
        layer.submodules.mlp.module = MixtureOfExperts
        layer.submodules.mlp.submodules.router = Router
    return layer


def _replaying(layer: ModuleSpec) -> ModuleSpec:
    """The same layer, in the decoder, where the rollout's experts may be replayed."""
    return ModuleSpec(module=ReplayingLayer, params=layer.params, submodules=layer.submodules)


def _local_layer(qk_layernorm: bool, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(num_experts, qk_layernorm=qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if not num_experts:
        parts.mlp = ModuleSpec(module=SwiGluMLP, submodules=parts.mlp.submodules)
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer
