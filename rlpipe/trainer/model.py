"""The policy as a Megatron GPTModel, built from a Hugging Face config; logits only at chosen positions.

Owns the model's shape and its forward pass up to logits. Weights come from `hf_bridge`, losses are in
`megatron`. A position reaches the output layer only if the policy sampled its next token, so prompt and tool
tokens cost no logits. The MTP layers are built but never run here (see `drafts/`).
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
    """A GPTModel with hidden states as output; `head` makes vocabulary-parallel logits from some of them.

    vocab_real: size of the unpadded vocabulary; columns beyond it never reach a softmax.
    draft_ids: [D] the draft's vocabulary, ascending, on the model's device; None for all.
    adapters: LoRA adapters, trained instead of the backbone (None: the full backbone is trained).
    stage_shapes: see `stages.tensors_of_stages`, which fills it.
    """

    vocab_real: int
    draft_ids: torch.Tensor | None = None
    adapters: Adapters | None
    stage_shapes: list[list[tuple[str, torch.Size, torch.dtype]]] | None = None

    def hidden_states(self, input_ids: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
        """Compute the final norm's output [B * S, H], row-major; on earlier stages, the states to pass on.

        input_ids: [B, S] int64, rows padded on the right; with a layout, flat tokens [1, N].
        """
        return self(input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=layout)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute all logits, gathered: [B, S] -> [B, S, V]. For tests and small models."""
        local = self.head(self.hidden_states(input_ids))
        return gather_from_tensor_model_parallel_region(local).view(*input_ids.shape, -1)

    def learn(self, *, policy: bool, draft: bool) -> None:
        """Choose what to train: the policy (with LoRA only its adapters), the draft, or both."""
        self.requires_grad_(policy and self.adapters is None)
        if self.adapters is not None:
            self.adapters.requires_grad_(policy)
        if self.mtp_process:
            self.mtp.requires_grad_(draft)

    def merged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return a parameter with its LoRA adapter merged; without an adapter, the parameter itself."""
        return parameter.detach() if self.adapters is None else self.adapters.merged(parameter)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disable the LoRA adapters within the context; has no effect if there are none."""
        return nullcontext() if self.adapters is None else self.adapters.off()

    def rotary(self, positions: np.ndarray) -> torch.Tensor:
        """Return the rotary embedding [N, 1, 1, d] of positions [N]."""
        return self.rotary_pos_emb(int(positions.max()) + 1)[positions]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute vocabulary-parallel logits [N, V_local] of hidden states [N, H]."""
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=self.head_weight)
        return logits.squeeze(1)[:, : self.local_vocab]

    @property
    def head_weight(self) -> torch.Tensor:
        """This rank's shard of the output layer, padding included: [V_padded / tp, H]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()

        # The output layer has no weight only if the embedding is the head.
        weight = self.output_layer.weight
        assert weight is not None
        return weight

    @property
    def local_vocab(self) -> int:
        """Number of real columns in this rank's vocabulary shard (the last shards may contain padding)."""
        shard = self.vocab_size // self.pg_collection.tp.size()
        return max(0, min(shard, self.vocab_real - self.vocab_start))

    @property
    def local_draft_ids(self) -> torch.Tensor | None:
        """Rows of `head_weight` that the draft uses; None for all."""
        if self.draft_ids is None:
            return None
        rows = self.draft_ids - self.vocab_start
        return rows[(rows >= 0) & (rows < self.local_vocab)]

    @property
    def vocab_start(self) -> int:
        """First token id of this rank's vocabulary shard."""
        return self.pg_collection.tp.rank() * (self.vocab_size // self.pg_collection.tp.size())

    def _preprocess(self, packed_seq_params: Layout | None = None, **inputs: Any) -> tuple[Any, ...]:
        """Embed like Megatron, but give each flat token the rotary embedding of its position."""
        embedded, rotary, *rest = super()._preprocess(**inputs)

        # Megatron's table is only as long as the input: too short for a few tokens that continue a long text.
        if packed_seq_params is not None:
            assert rotary is not None  # the model has rotary embeddings
            if packed_seq_params.reach > len(rotary):
                rotary = self.rotary_pos_emb(packed_seq_params.reach)
            rotary = rotary[packed_seq_params.positions]

        # Recomputation drops the gradients of a layer if its input requires no gradient.
        if self.adapters is not None and self.pre_process and torch.is_grad_enabled():
            embedded.requires_grad_()
        return embedded, rotary, *rest

    def _postprocess(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Return flat hidden states of all tokens, instead of Megatron's logits or loss."""
        if not self.post_process:
            return hidden_states

        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.transpose(0, 1).flatten(0, 1)


def build_model(hf_config: Mapping[str, Any], config: TrainerConfig, runtime: Runtime) -> PolicyModel:
    """Build an uninitialised policy with the shape of a Hugging Face checkpoint, on this rank's device.

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

    # On a later stage the MTP layer's copy of the embedding is the tied head.
    if arch.tied and model.mtp_process and not first:
        model.output_layer.register_parameter("weight", None)

    # The head needs all tokens on every rank.
    if last and config.sp:
        model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, True

    # Layouts give the position of each token on every context parallel rank.
    model.rotary_pos_emb.cp_group = None
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

    # The routers' expert bias stays in float32, whatever the dtype of the model.
    model = model.to(device=runtime.device, dtype=runtime.dtype)
    for module in model.modules():
        if isinstance(module, Router):
            module._maintain_float32_expert_bias()  # pyright: ignore[reportCallIssue]
    return model


def transformer_config(arch: Architecture, config: TrainerConfig, runtime: Runtime) -> TransformerConfig:
    """Return Megatron's configuration of a Hugging Face model."""
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

    # Micro-batches differ in length. Set after construction: there Megatron checks a dispatcher that is not
    # used.
    transformer.variable_seq_lengths = config.pp > 1
    return transformer


def _pipeline(arch: Architecture, config: TrainerConfig) -> dict[str, Any]:
    """Return Megatron's settings of the pipeline stages: the layers of each."""
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
    """Return Megatron's settings of recomputation in the backward pass."""
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
    """Return Megatron's settings of the MoE layers: no auxiliary loss, no dropped token, float32 scores."""
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
