"""The draft inside Megatron's GPTModel: its layers, unrolled on demand.

Computes the draft's hidden states from the target's; owns no loss and no weights. Megatron's stock MTP shifts
the tokens of a row by one per depth and attaches its loss to the target's graph. Here the caller chooses the
token that each anchor reads, so anchors may have any layout. The draft runs only if this function is called,
so a frozen draft adds no cost to a policy step.
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
    t + 1 .. t + K. rotary_pos_emb: [S, 1, 1, d], of the anchors' positions t. The engine uses t + k - 1, but
    attention within a depth depends only on distances. layout: which tokens attend to which; without one,
    attention in rows is causal.

    Depth k at anchor t reads token t + k and depth k - 1 at anchor t; its logits (through the shared head)
    predict token t + k + 1. Returns K tensors [S, B, H]; anchors for which one of these tokens is padding
    must be masked out.

    A single MTP layer serves every depth (MiMo). If there are several layers, each serves one depth
    (DeepSeek-V3), and the last one also all deeper depths. Target, embedding and head are detached: they get
    no gradient. At the first depth of each layer the states equal those of the decoding engine exactly. At a
    layer's further depths they differ: here anchors attend to keys of the same depth, but in the engine to
    keys of the layer's first depth. On the shipped model the acceptance length is 3.645 here against
    3.651 with the engine's keys, so this simple form is used.
    """
    import torch

    recompute = model.config.recompute_granularity == "full" and torch.is_grad_enabled()
    # requires_grad: recomputation drops the gradients of a layer if none of its inputs requires a gradient
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

    state: [S, B, H], the state of the depth before (at depth 0: of the target); sequence parallel ranks
    divide S. tokens: [B, S], the tokens that this depth reads. rotary_pos_emb: [S, 1, 1, d]. recompute: run
    the layer again in the backward pass instead of storing its activations.
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

    # Calls a private method, because Megatron's public forward shifts the tokens itself.
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
