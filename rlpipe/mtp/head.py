"""The draft inside Megatron's GPTModel: one MTP layer, unrolled on demand.

Owns how hidden states of the target become hidden states of the draft; owns no loss and no weights.
Megatron's stock MTP runs one layer per depth and attaches its loss to the target's graph; here the
single layer is unrolled, and nothing of it runs unless this function is called, so a frozen draft
costs a policy step nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel


def draft_hidden_states(
    model: GPTModel,
    hidden: torch.Tensor,
    input_ids: torch.Tensor,
    rotary_pos_emb: torch.Tensor,
    depths: int,
) -> list[torch.Tensor]:
    """Hidden states of the draft at depths 1..depths, teacher-forced on `input_ids`.

    hidden: [S, B, H], the target's final-norm output. input_ids: [B, S].
    Depth k at anchor t reads token t+k and depth k-1 at anchor t; its logits (through the shared
    head) predict token t+k+1. Returns `depths` tensors [S, B, H]; the last k anchors of depth k read
    tokens rolled in from the other end and must be masked out.
    Target, embedding and head get no gradient from here: they are detached.
    Depth 1 equals the decoding engine exactly. Deeper, Megatron attends to keys of the same depth,
    where the engine attends to depth-1 keys of the prefix.
    """
    import torch

    def embedding(**inputs: torch.Tensor) -> torch.Tensor:
        return model.embedding(**inputs).detach()

    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # requires_grad: activation recomputation drops the gradients of a layer none of whose inputs needs one
    state, ids, states = hidden.detach().requires_grad_(True), input_ids, []
    for _ in range(depths):
        state, ids, positions = model.mtp.layers[0](
            input_ids=ids,
            position_ids=positions,
            hidden_states=state,
            attention_mask=None,
            rotary_pos_emb=rotary_pos_emb,
            embedding=embedding,
        )
        states.append(state)
    return states
