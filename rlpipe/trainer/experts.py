"""A mixture of experts whose tensor parallel ranks all hold every token.

Router and experts are Megatron's; its own way between them (`MoELayer.forward`) needs sequence parallelism
beside tensor parallelism. Here each rank sends all tokens through its slice of every expert, so outputs are
sums over ranks, and so are the gradients of the tokens and of the router's weights for them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.router import TopKRouter


class Router(TopKRouter):
    """Megatron's; its own product of scores names a TransformerEngine kernel where there is none (0.16.1)."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Scores [S, B, experts] in float32 of [S, B, H]."""
        return torch.nn.functional.linear(input.float(), self.weight.float())


class MixtureOfExperts(MoELayer):
    """y = sum over the chosen experts e of p_e(x) f_e(x)."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] -> [S, B, H]."""
        weights, chosen = self.router(hidden_states)  # [S * B, experts]
        tokens = copy_to_tensor_model_parallel_region(hidden_states.flatten(0, 1))
        sent, sent_weights, order = permute(tokens, chosen, probs=weights)
        # not of `weights`: the gradient of a transposed tensor is lost in Megatron's sum over ranks
        sent_weights = copy_to_tensor_model_parallel_region(sent_weights)
        found, _bias = self.experts(sent, chosen.sum(0), sent_weights)
        mixed = unpermute(found, order, restore_shape=tokens.shape)
        return reduce_from_tensor_model_parallel_region(mixed).view_as(hidden_states), None
