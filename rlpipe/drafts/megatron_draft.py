"""The draft inside Megatron's GPTModel: its layers, unrolled on demand.

Owns the way from the target's hidden states to the draft's; owns no loss and no weights. Megatron's stock MTP
rolls the tokens of a row by one per depth and attaches its loss to the target's graph. Here the caller
chooses the token that each anchor reads, so anchors may have any layout. Nothing runs unless this function is
called: a frozen draft adds no cost to a policy step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams


def draft_hidden_states(
    model: GPTModel,
    hidden: torch.Tensor,
    following: torch.Tensor,
    *,
    rotary_pos_emb: torch.Tensor,
    layout: PackedSeqParams | None = None,
) -> list[torch.Tensor]:
    """Compute the hidden states of the draft at depths 1..K, teacher-forced.

    hidden: [S, B, H], the target's final-norm output at every anchor t. following: [K, B, S], the tokens
    t + 1 .. t + K. rotary_pos_emb: of the anchors, [S, 1, 1, d]: attention within a depth depends on
    distances only, so position t serves for the engine's t + k - 1. layout: which tokens attend to which;
    without one, rows are causal.

    Depth k at anchor t reads token t + k and depth k - 1 at anchor t; its logits (through the shared head)
    predict token t + k + 1. Returns K tensors [S, B, H]; anchors with padding for a token must be masked out.

    A single MTP layer serves every depth (MiMo). Of several layers, each serves its own depth (DeepSeek-V3),
    and the last one also the deeper ones. Target, embedding and head get no gradient from here: they are
    detached.
    The first depth of each layer equals the decoding engine exactly. Where a layer serves more, anchors
    attend to keys of the same depth and the engine attends to keys of the layer's first: on the shipped model
    the acceptance length is 3.645 against 3.651, so this simple form is used.
    """
    import torch

    recompute = model.config.recompute_granularity == "full" and torch.is_grad_enabled()
    # requires_grad: recomputation drops the gradients of a layer none of whose inputs needs one
    state, states = hidden.detach().requires_grad_(True), []
    for depth, ids in enumerate(following):
        state = draft_step(
            model, depth, state, tokens=ids, rotary_pos_emb=rotary_pos_emb, layout=layout, recompute=recompute
        )
        states.append(state)
    return states


def draft_step(
    model: GPTModel,
    depth: int,
    state: torch.Tensor,
    *,
    tokens: torch.Tensor,
    rotary_pos_emb: torch.Tensor,
    layout: PackedSeqParams | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Run one depth, counted from 0; return hidden states [S, B, H] that predict the next token.

    state: [S, B, H], of the depth before (of the target at depth 0); sequence parallel ranks divide S.
    tokens: [B, S], read at this depth. rotary_pos_emb: [S, 1, 1, d]. recompute: run the layer again in the
    backward pass instead of keeping its activations.
    """
    import torch
    from megatron.core.tensor_parallel import (
        checkpoint,
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    layer, tp = model.mtp.layers[min(depth, len(model.mtp.layers) - 1)], model.pg_collection.tp
    shares_tokens = model.config.sequence_parallel
    with torch.no_grad():
        embedded = model.embedding(input_ids=tokens, position_ids=None)

    # Private, because Megatron's public forward rolls the tokens itself.
    def run(state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return layer._proj_and_transformer_layer(
            hidden_states=state,
            decoder_input=embedded,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=layout,
        )

    if shares_tokens:
        state = scatter_to_sequence_parallel_region(state, group=tp)
    state = checkpoint(run, False, state, embedded) if recompute else run(state, embedded)
    if shares_tokens:
        state = gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False, group=tp)
    return state
