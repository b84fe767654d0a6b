"""Parts of the local layers (without TransformerEngine): attention, and the specs of the layers.

Megatron's `DotProductAttention` stores the [S, S] scores; torch's fused kernel does not. Tokens come flat,
with a layout that defines which tokens attend to which (`BranchLayout` here, `continuation` for windows that
continue a finished pass), or as rows padded on the right. Rows need no mask: only padding attends to padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

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
from rlpipe.trainer.attention import BranchPlan, branch_attention, has_flash
from rlpipe.trainer.delta_net import GatedDeltaNet, Succession
from rlpipe.trainer.experts import MixtureOfExperts, Replay, ReplayingLayer, Router
from rlpipe.trainer.fused import RmsNorm, SwiGluMLP
from rlpipe.trainer.grouped import GroupedExperts
from rlpipe.trainer.mla import LatentConfig, latent_layer
from rlpipe.trainer.varlen import VarlenPlan, varlen_attention


class BranchLayout(PackedSeqParams):
    """The branches of a flat micro-batch (see `rlpipe.batching.micro_batch`), as attention receives them.

    Megatron passes packed_seq_params to core attention unchanged, also in recomputation. Its THD code is not
    used, because Megatron does not recognise this qkv_format.

    local_branches: indices of the branches with queries on this rank (None: all).
    """

    local_branches: Sequence[int] | None = None

    def __init__(
        self,
        branches: Sequence[Branch],
        positions: torch.Tensor,
        *,
        retain_keys: bool = False,
        replay: Replay | None = None,
    ) -> None:
        """Lay out N tokens.

        positions: [N] int64, position of each token in its trajectory. retain_keys: every attention layer
        stores its keys and values here until `release`. replay: the recorded experts of each token.
        """
        super().__init__(qkv_format="branches")
        self.branches, self.positions, self.replay = branches, positions, replay

        # All positions are below `reach`.
        self.reach = max(branch.shared + branch.length for branch in branches)
        self._retained: RetainedKeys | None = {} if retain_keys else None

    @cached_property
    def plan(self) -> BranchPlan:
        """The calls of the CPU kernel that compute the attention of `local_branches`."""
        return BranchPlan(self.branches, self.local_branches, self.positions.device)

    @cached_property
    def varlen_plan(self) -> VarlenPlan:
        """The calls of the GPU kernel that compute the attention of `local_branches`."""
        return VarlenPlan(self.branches, self.local_branches, self.positions.device)

    @cached_property
    def succession(self) -> Succession:
        """The order of tokens, for delta nets."""
        return Succession(self.branches, self.positions.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attention: CausalAttention
    ) -> torch.Tensor:
        """Attend from each branch to its context, then causally to itself; all [1, heads, N, d]."""
        if self._retained is not None:
            self._retained[attention] = key, value
        return self.attend_to(query, key, value, attention=attention)

    def attend_to(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention: CausalAttention,
    ) -> torch.Tensor:
        """Attend: queries [1, heads, Q, d] of `local_branches`, keys [1, groups, N, d] of all branches."""
        if query.is_cuda and has_flash(query):
            return varlen_attention(query, key, value, plan=self.varlen_plan, scale=attention.scale)
        if has_flash(query):
            return branch_attention(query, key, value, plan=self.plan, scale=attention.scale)
        return self.attend_masked(query, key, value, attention=attention)

    def attend_masked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention: CausalAttention,
    ) -> torch.Tensor:
        """Attend with one call for each branch, with a mask [length, shared + length] if it has a context.

        This is for inputs that no flash kernel takes (float32 on a GPU). Memory grows quadratically with the
        tokens.
        """
        lengths = [branch.length for branch in self.branches]
        selected = range(len(lengths)) if self.local_branches is None else self.local_branches
        keys, values = (x.split(lengths, dim=2) for x in (key, value))
        outputs = []

        for i, q in zip(selected, query.split([lengths[i] for i in selected], dim=2), strict=True):
            branch = self.branches[i]
            k, v = (
                torch.cat([*(x[j][:, :, :count] for j, count in branch.context), x[i]], dim=2)
                for x in (keys, values)
            )

            # All queries see the full context; within the branch they attend causally.
            mask = None
            if branch.context:
                unseen = torch.full(
                    (branch.length, k.shape[2]), -torch.inf, dtype=query.dtype, device=query.device
                )
                mask = unseen.triu(branch.shared + 1)
            outputs.append(attention.attend(q, k, v, mask=mask))

        return torch.cat(outputs, dim=2)

    def release(self) -> RetainedKeys:
        """Return the keys and values of each attention layer; recomputation afterwards stores none."""
        assert self._retained is not None, "the layout was made without retain_keys"
        retained, self._retained = self._retained, None
        return retained


class Layout(Protocol):
    """Defines which of the flat tokens attend to which: `BranchLayout`, or `continuation.Continuation`."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attention: CausalAttention
    ) -> torch.Tensor: ...


class CausalAttention(MegatronModule):
    """softmax(Q K^T / sqrt(d)) V with a causal mask, grouped queries, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None  # Megatron derives it from hidden_size and the number of heads
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

        # cuDNN's attention crashes the process with additive masks on views (misaligned address).
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: Layout | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Attend: query [S, B, heads, d], key and value [S, B, groups, d] -> [S, B, heads * d].

        With a layout, which defines which tokens attend to which, B is 1 and S the flat tokens.
        """
        seq, batch = query.shape[:2]

        # Megatron puts the sequence first, torch's kernels the heads.
        heads_first = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        if packed_seq_params is None:
            context = self.attend(*heads_first)
        else:
            context = packed_seq_params.attend(*heads_first, attention=self)
        return context.permute(2, 0, 1, 3).reshape(seq, batch, -1)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend: query [B, heads, Q, d], key, value [B, groups, S, d] -> shape of query.

        mask: added to the scores (None: causal).
        """
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
    """Megatron's attention with an output gate, in eager mode on a CPU.

    Megatron compiles the gate, which on a CPU takes seconds and needs a C++ compiler.
    """

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Compute x * sigmoid(gate), both [S, B, width]."""
        if x.is_cuda:
            return super()._apply_output_gate(x, gate)

        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * gate.reshape(x.shape).to(wide).sigmoid()).to(x.dtype)


RetainedKeys = dict[CausalAttention, tuple[torch.Tensor, torch.Tensor]]  # keys and values [1, groups, N, d]


def block_specs(
    config: TransformerConfig, *, te: bool, dense: int = 0, delta: DeltaNet | None = None
) -> tuple[TransformerBlockSubmodules, ModuleSpec | None]:
    """Build the specs of this pipeline stage's decoder layers and of its MTP block (None without one).

    te: use TransformerEngine's layers. dense: how many of the first layers have no experts. delta: describes
    the delta nets that replace the attention of some layers.
    """
    # The MTP block uses the plain layer, as no experts are recorded for its tokens.
    layer = _layer(config, config.num_moe_experts, te=te)
    decoder_layer = _replaying(layer) if config.num_moe_experts else layer
    layers = [_layer(config, None, te=te)] * dense + [decoder_layer] * (config.num_layers - dense)
    norm: Any = TENorm if te else RmsNorm

    # Replace the attention of some layers by a delta net.
    if delta is not None:
        linear = _layer(config, config.num_moe_experts, te=te)
        parts = _parts(linear)
        parts.input_layernorm = norm  # TransformerEngine fuses this norm into attention
        parts.self_attention = ModuleSpec(module=GatedDeltaNet, params={"delta": delta})
        linear = _replaying(linear) if config.num_moe_experts else linear
        layers = [linear if is_linear else decoder_layer for is_linear in delta.linear]

    # Select the layers of this stage.
    first = get_transformer_layer_offset(config)
    layers = layers[first : first + get_num_layers_to_build(config)]
    decoder = TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
    if not config.mtp_num_layers:
        return decoder, None

    # Only the last stage gets a spec.
    mtp: Any = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=te)
    if mtp is None:
        return decoder, None
    for spec in mtp.layer_specs:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = norm
    return decoder, mtp


def _parts(layer: ModuleSpec) -> Any:
    """Return a layer's submodules, which Megatron types only as `object` (`ModuleSpec.submodules`)."""
    return layer.submodules


def _layer(config: TransformerConfig, num_experts: int | None, *, te: bool) -> ModuleSpec:
    """Build the spec of one decoder layer; num_experts: experts of its MoE, None for a dense layer."""
    make = get_gpt_layer_with_transformer_engine_spec if te else _local_layer
    layer = make(qk_layernorm=config.qk_layernorm, num_experts=num_experts)
    if isinstance(config, LatentConfig):
        layer = latent_layer(layer, RmsNorm, CausalAttention)

    # Replace modules of Megatron's spec.
    parts = _parts(layer)
    if config.attention_output_gate:
        parts.self_attention.module = GatedAttention
    if num_experts:
        parts.mlp.module = MixtureOfExperts
        parts.mlp.submodules.router = Router
        parts.mlp.submodules.experts = ModuleSpec(
            module=GroupedExperts, submodules=parts.mlp.submodules.experts.submodules
        )
    return layer


def _replaying(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a decoder layer that replays the rollout's choice of experts."""
    return ModuleSpec(module=ReplayingLayer, params=layer.params, submodules=layer.submodules)


def _local_layer(*, qk_layernorm: bool, num_experts: int | None) -> ModuleSpec:
    """Build Megatron's local layer with the norms, attention and MLP of this package."""
    layer = get_gpt_layer_local_spec(num_experts, qk_layernorm=qk_layernorm, normalization="RMSNorm")
    parts = _parts(layer)
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if not num_experts:
        parts.mlp = ModuleSpec(module=SwiGluMLP, submodules=parts.mlp.submodules)

    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return layer
