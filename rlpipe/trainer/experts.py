"""A mixture of experts whose tensor parallel ranks all hold every token.

Router and experts are Megatron's; its own way between them (`MoELayer.forward`) needs sequence parallelism
beside tensor parallelism. Here each rank sends all tokens through its slice of every expert, so outputs are
sums over ranks, and so are the gradients of the tokens and of the router's weights for them.

With expert parallelism a rank holds some of the experts whole (but for that slice). Data parallel ranks then
exchange tokens: each goes to the rank of its expert, and what the expert makes of it comes back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.router import TopKRouter


class Router(TopKRouter):
    """Megatron's; its own product of scores names a TransformerEngine kernel where there is none (0.16.1).

    So does the bias of its choice, which it also moves after each step to balance the experts; here the bias
    is a buffer that stays as it was loaded.
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        if config.moe_router_score_function == "sigmoid":
            del self.expert_bias  # None, as without a bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Scores [S, B, experts] in float32 of [S, B, H]."""
        return torch.nn.functional.linear(input.float(), self.weight.float())


class MixtureOfExperts(MoELayer):
    """y = sum over the chosen experts e of p_e(x) f_e(x), and f(x) of a shared one where there is one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Megatron's, with experts whose optimizer is apart whether ranks share them or not.

        Megatron puts them apart with expert parallelism alone, and then loads no checkpoint of other sizes.
        """
        super().__init__(*args, **options)
        for parameter in self.experts.parameters():
            parameter.allreduce = False

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] -> [S, B, H]; with selective recomputation only the input is kept for the gradient."""
        if self.moe_layer_recompute and torch.is_grad_enabled():
            return checkpoint(self._mixture, False, hidden_states), None
        return self._mixture(hidden_states), None

    def _mixture(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden_states)  # [S * B, experts]
        tokens = copy_to_tensor_model_parallel_region(hidden_states.flatten(0, 1))
        sent, sent_weights, order = permute(tokens, chosen, probs=weights)
        # not of `weights`: the gradient of a transposed tensor is lost in Megatron's sum over ranks
        sent_weights = copy_to_tensor_model_parallel_region(sent_weights)
        found = self._through_experts(sent, sent_weights, chosen.sum(0))
        mixed = unpermute(found, order, restore_shape=tokens.shape)
        mixed = reduce_from_tensor_model_parallel_region(mixed).view_as(hidden_states)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden_states)

    def _through_experts(
        self, tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """[N, H] of tokens [N, H] and their weights [N], in order of their experts; counts: [experts]."""
        ranks, group = self.ep_group.size(), self.ep_group
        if ranks == 1:
            return self.experts(tokens, counts, weights)[0]
        everyone = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(everyone, counts, group=group)
        arriving = torch.stack(everyone).view(ranks, ranks, -1)[:, group.rank()]  # [from rank, local expert]
        there, here = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        by_rank = torch.arange(arriving.numel(), device=counts.device).view_as(arriving)
        received, received_weights = sort_chunks_by_idxs(
            all_to_all(group, tokens, here, there),
            arriving.flatten(),
            by_rank.T.flatten(),
            probs=all_to_all(group, weights, here, there),
        )
        found, _bias = self.experts(received, arriving.sum(0), received_weights)
        back, _ = sort_chunks_by_idxs(found, arriving.T.flatten(), by_rank.view(-1, ranks).T.flatten())
        return all_to_all(group, back, there, here)
