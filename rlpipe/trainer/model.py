"""The policy as a Megatron GPTModel: built from a Hugging Face config, asked for chosen positions only.

Owns the model's shape and its forward pass up to logits. Weights come from `hf_bridge`, losses live in
`megatron`. Only positions whose next token was sampled by the policy reach the output layer, so prompt
and tool tokens cost no head; the MTP layers are built but never run here (see `drafts/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig

from rlpipe.config.lora import check_lora
from rlpipe.config.trainer import Recompute, TrainerConfig
from rlpipe.models import Architecture, read_architecture
from rlpipe.models.base import Experts
from rlpipe.trainer.continuation import Continuation
from rlpipe.trainer.experts import Router
from rlpipe.trainer.layers import BranchLayout, block_specs
from rlpipe.trainer.linear import use_onednn
from rlpipe.trainer.lora import Adapters, attach
from rlpipe.trainer.mla import latent_config
from rlpipe.trainer.runtime import Runtime

Layout: TypeAlias = BranchLayout | Continuation


class PolicyModel(GPTModel):
    """GPTModel whose forward ends with hidden states; `head` makes vocabulary-parallel logits of some.

    vocab_real: size of the unpadded vocabulary; columns beyond it never reach a softmax.
    adapters: that are trained in place of the backbone (None: all of it is).
    stage_shapes: see `stages.tensors_of_stages`, which fills it.
    """

    vocab_real: int
    adapters: Adapters | None
    stage_shapes: list[list[tuple[str, torch.Size, torch.dtype]]] | None = None

    def hidden_states(self, input_ids: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
        """Final-norm output [B * S, H], row-major; of a pipeline stage before the last what it passes on.

        input_ids: [B, S] int64, rows padded on the right; with a layout [1, N], flat.
        """
        return self(input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=layout)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """All logits, gathered: [B, S] -> [B, S, V]. For tests and small models."""
        local = self.head(self.hidden_states(input_ids))
        return gather_from_tensor_model_parallel_region(local).view(*input_ids.shape, -1)

    def learn(self, *, policy: bool, draft: bool) -> None:
        """Choose what has gradients: the policy, by its adapters alone where it has any, and the draft."""
        self.requires_grad_(policy and self.adapters is None)
        if self.adapters is not None:
            self.adapters.requires_grad_(policy)
        if self.mtp_process:
            self.mtp.requires_grad_(draft)

    def merged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What a parameter and its adapter, if it has one, come to; else its own memory."""
        return parameter.detach() if self.adapters is None else self.adapters.merged(parameter)

    def without_adapters(self) -> AbstractContextManager[None]:
        """The backbone as it was loaded, where adapters are trained; nothing changes where none are."""
        return nullcontext() if self.adapters is None else self.adapters.off()

    def rotary(self, positions: np.ndarray) -> torch.Tensor:
        """Rotary embedding [N, 1, 1, d] of positions [N]."""
        return self.rotary_pos_emb(int(positions.max()) + 1)[positions]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel logits [N, V_local] of hidden states [N, H]."""
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=self.head_weight)
        return logits.squeeze(1)[:, : self.local_vocab]

    @property
    def head_weight(self) -> torch.Tensor:
        """This rank's shard of the output layer, padding included: [V_padded / tp, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None  # left out only where the embedding is the head
        return weight

    @property
    def local_vocab(self) -> int:
        """Real columns of this rank's vocabulary shard (the last shards may hold padding)."""
        shard = self.vocab_size // self.pg_collection.tp.size()
        return max(0, min(shard, self.vocab_real - self.vocab_start))

    @property
    def vocab_start(self) -> int:
        """First token id of this rank's vocabulary shard."""
        return self.pg_collection.tp.rank() * (self.vocab_size // self.pg_collection.tp.size())

    def _preprocess(self, packed_seq_params: Layout | None = None, **inputs: Any) -> tuple[Any, ...]:
        """Megatron's, with the rotary embedding of each flat token at its own position."""
        embedded, rotary, *rest = super()._preprocess(**inputs)
        if packed_seq_params is not None:
            assert rotary is not None  # the model has rotary embeddings
            if packed_seq_params.reach > len(rotary):  # a few tokens that continue a long text
                rotary = self.rotary_pos_emb(packed_seq_params.reach)
            rotary = rotary[packed_seq_params.positions]
        if self.adapters is not None and self.pre_process and torch.is_grad_enabled():
            embedded.requires_grad_()  # recomputation drops the gradients of layers whose input needs none
        return embedded, rotary, *rest

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.transpose(0, 1).flatten(0, 1)


def build_model(hf_config: Mapping[str, Any], config: TrainerConfig, runtime: Runtime) -> PolicyModel:
    """An uninitialised policy with the shape of a Hugging Face checkpoint, on this rank's device.

    Raises ValueError for a family or feature that is not supported.
    """
    arch = read_architecture(hf_config)
    if arch.latent and runtime.te:
        raise ValueError(
            f"{arch.family!r} has latent attention, which needs our own layers: set trainer.layers=local."
        )
    transformer = transformer_config(arch, config, runtime)
    dense = arch.experts.dense if arch.experts else 0
    decoder, mtp = block_specs(transformer, te=runtime.te, dense=dense, delta=arch.delta)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = PolicyModel(
        config=transformer,
        transformer_layer_spec=decoder,
        vocab_size=-(-arch.vocab // config.tp) * config.tp,
        max_sequence_length=arch.max_position,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_percent=arch.rotary_dim / arch.head_dim,
        rotary_base=arch.rope.theta,
        mtp_block_spec=mtp,
    )
    model.vocab_real, model.adapters = arch.vocab, None
    if arch.tied and model.mtp_process and not first:  # its copy of the embedding is the head
        model.output_layer.register_parameter("weight", None)
    if last and config.sp:  # the head reads all tokens on every rank
        model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, True
    model.rotary_pos_emb.cp_group = None  # layouts say where a token stands, on whichever rank it lies
    if config.lora.active:
        check_lora(config.lora, hf_config)
        attach(model, arch, config.lora, seed=config.seed)
    if arch.rope.scaling:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary.inv_freq.new_tensor(arch.rope.frequencies(arch.rotary_dim))
    if runtime.device.type == "cpu":
        use_onednn(model.decoder)
        if model.mtp_process:
            use_onednn(model.mtp)
    model = model.to(device=runtime.device, dtype=runtime.dtype)
    for module in model.modules():
        if isinstance(module, Router):
            module._maintain_float32_expert_bias()  # pyright: ignore[reportCallIssue]
    return model


def transformer_config(arch: Architecture, config: TrainerConfig, runtime: Runtime) -> TransformerConfig:
    """Megatron's description of a Hugging Face model."""
    make = partial(latent_config, arch) if arch.latent else TransformerConfig
    transformer = make(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.intermediate,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        qk_layernorm=arch.qk_norm,
        hetereogenous_dist_checkpoint=arch.uneven,
        attention_output_gate=arch.delta is not None,
        layernorm_zero_centered_gamma=arch.delta is not None,
        add_qkv_bias=arch.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=arch.softmax_scale,
        tensor_model_parallel_size=config.tp,
        sequence_parallel=config.sp,
        mtp_num_layers=arch.mtp_layers or None,
        **_recomputation(config.recompute),
        **_pipeline(arch, config),
        **_routing(arch.experts, config.ep),
        **runtime.model_flags,
    )
    # micro-batches differ in length; set late: Megatron refuses it with a token dispatcher that we do not use
    transformer.variable_seq_lengths = config.pp > 1
    return transformer


def _pipeline(arch: Architecture, config: TrainerConfig) -> dict[str, Any]:
    """Megatron's description of the stages: which layers each has."""
    if config.pp == 1:
        return {}
    layout = [["decoder"] * count for count in config.stage_layers(arch.layers)]
    layout[0].insert(0, "embedding")
    layout[-1] += ["mtp"] * arch.mtp_layers + ["loss"]
    return {
        "pipeline_model_parallel_size": config.pp,
        "pipeline_model_parallel_layout": layout,
    }


def _recomputation(recompute: Recompute) -> dict[str, Any]:
    """Megatron's description of what the backward pass computes again."""
    if recompute is Recompute.FULL:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute is Recompute.SELECTIVE:
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    return {}


def _routing(experts: Experts | None, ranks: int) -> dict[str, Any]:
    """Megatron's description of a mixture: no auxiliary loss, no token dropped, scores in float32."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "expert_model_parallel_size": ranks,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normed,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_topk_scaling_factor": experts.scaling if experts.sigmoid else None,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.groups_per_token if experts.groups > 1 else None,
        "moe_shared_expert_gate": experts.gated,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }
