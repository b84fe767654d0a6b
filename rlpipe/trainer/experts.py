"""MoE layers in which every tensor parallel rank holds every token.

Router and experts are Megatron's. Megatron's path between them (`MoELayer.forward`) needs sequence
parallelism if there is tensor parallelism. Here each rank sends all tokens through its slice of every expert.
Outputs are therefore sums over ranks, and so are the gradients of the tokens and of their router weights.

With expert parallelism a rank holds only some of the experts (each cut by tensor parallelism as before).
Data parallel ranks then exchange tokens: each token is sent to the rank of its expert, and the output is sent
back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    all_to_all,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from rlpipe.metrics.values import Mean, Value


@dataclass(slots=True)
class Replay:
    """The experts chosen for each token in the rollout, which the trainer uses again (R3, arXiv:2510.11370).

    routes: [N, layers with experts, experts per token], of a micro-batch. unrecorded: value that marks a
    token without a record; the trainer's router chooses its experts. counts: for each layer that has run, [3]
    int64: tokens, recorded tokens, and recorded tokens for which the trainer's choice differs.
    """

    routes: torch.Tensor
    unrecorded: int
    counts: list[torch.Tensor] = field(default_factory=list)

    def of_layer(self, number: int, layers: int) -> LayerReplay:
        """Select a decoder layer, counted from 1 over all `layers`; the first layers may have no experts."""
        return LayerReplay(self, self.routes[:, number - 1 - layers + self.routes.shape[1]])

    def padded(self, count: int) -> Replay:
        """Append `count` tokens without a record."""
        return Replay(F.pad(self.routes, (0, 0, 0, 0, 0, count), value=self.unrecorded), self.unrecorded)

    def metrics(self) -> dict[str, Value]:
        """Compute the shares of replayed and changed choices over all layers that this rank has run."""
        tokens, recorded, differing = torch.stack(self.counts).sum(0).tolist() if self.counts else (0, 0, 0)
        shares = {"routes/replayed": (recorded, tokens), "routes/flipped": (differing, recorded)}
        return {name: Mean(part, whole) for name, (part, whole) in shares.items() if whole}


@dataclass(slots=True)
class LayerReplay:
    """The routes of one layer of a `Replay`; chosen: [N, experts per token]."""

    replay: Replay
    chosen: torch.Tensor

    def choice(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are recorded [N, 1], and the experts to use for each token [N, experts].

        chosen: [N, experts] bool, the choice by the trainer's own scores.
        """
        recorded = (self.chosen != self.replay.unrecorded).all(-1, keepdim=True)
        numbers = self.chosen.long().masked_fill(~recorded, 0)
        replayed = torch.where(recorded, torch.zeros_like(chosen).scatter(1, numbers, value=True), chosen)

        # Count on the device, without waiting for it.
        differ = (replayed != chosen).any(-1)
        counts = torch.full_like(recorded.sum(), len(recorded)), recorded.sum(), differ.sum()
        self.replay.counts.append(torch.stack(counts))
        return recorded, replayed


class Router(TopKRouter):
    """Megatron's router without TransformerEngine's kernels, which Megatron 0.16.1 needs even on a CPU.

    Megatron's router uses one kernel for the scores and one for the bias of the choice. It also changes that
    bias after each step to balance the experts; here the bias is a buffer that stays as loaded.

    replay: recorded choices replace the router's. The weights are still the router's scores of the chosen
    experts, and gradients flow through them. Megatron's `RouterReplay` also records the routers of MTP
    layers, holds one micro-batch at a time, and requires a record of every token.
    """

    replay: LayerReplay | None = None

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)

        # The router reads all tokens on every rank.
        self.weight.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]

        # Megatron sets an attribute of this name to None, which would prevent the buffer.
        if config.moe_router_score_function == "sigmoid":
            assert config.num_moe_experts is not None
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Compute scores [S, B, experts] in float32 of [S, B, H]."""
        return torch.nn.functional.linear(input.float(), self.weight.float())

    def routing(self, logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [N, experts], 0 for experts that are not chosen, and the choice [N, experts], bool.

        logits: [S, B, experts].
        """
        weights, chosen = super().routing(logits, **options)
        if self.replay is None:
            return weights, chosen

        recorded, replayed = self.replay.choice(chosen)
        return torch.where(recorded, self._weights(logits.flatten(0, -2), replayed), weights), replayed

    def _weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Compute the weights of chosen experts; logits and chosen [N, experts]."""
        config = self.config
        if self.score_function == "sigmoid":
            scores = logits.sigmoid() * chosen
            weights = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        elif config.moe_router_pre_softmax:
            weights = logits.softmax(-1) * chosen
        else:
            weights = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
        return weights * (config.moe_router_topk_scaling_factor or 1.0)


class ReplayingLayer(TransformerLayer):
    """A decoder layer whose router uses the recorded routes from the layout of the pass.

    So the routes are right even if the layer is recomputed for the gradient after another micro-batch has
    run. MTP layers are Megatron's: they have no record, because the rollout's draft model read other tokens.
    """

    def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """Run Megatron's layer, with `packed_seq_params` by name, as Megatron's block passes it."""
        replay = getattr(packed_seq_params, "replay", None)
        self.mlp.replay = replay and replay.of_layer(self.layer_number, self.config.num_layers)
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class MixtureOfExperts(MoELayer):
    """y = sum over the chosen experts e of p_e(x) f_e(x), plus f(x) of a shared expert if there is one.

    replay: routes of the next pass (None: the router chooses).
    """

    router: Router
    replay: LayerReplay | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """Build Megatron's layer; its experts always get a separate optimizer.

        Megatron does so only with expert parallelism, which would make checkpoints depend on that setting.
        """
        super().__init__(*args, **options)
        for parameter in self.experts.parameters():
            parameter.allreduce = False

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Map [S, B, H] to [S, B, H]; with selective recomputation, store only the input for the gradient."""
        if self.moe_layer_recompute and torch.is_grad_enabled():
            return checkpoint(partial(self._mixture, self.replay), False, hidden_states), None
        return self._mixture(self.replay, hidden_states), None

    def _mixture(self, replay: LayerReplay | None, hidden_states: torch.Tensor) -> torch.Tensor:
        """Mix the outputs of the experts of each token [S, B, H]."""
        self.router.replay = replay

        # With sequence parallelism collect all tokens on every rank first.
        everywhere = hidden_states
        if self.config.sequence_parallel:
            everywhere = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )

        # Sort copies of the tokens by their experts.
        weights, chosen = self.router(everywhere)  # [S * B, experts]
        tokens = copy_to_tensor_model_parallel_region(everywhere.flatten(0, 1))
        sent, sent_weights, order = permute(tokens, chosen, probs=weights)

        # Not applied to `weights`: Megatron's sum over ranks loses the gradient of a transposed tensor.
        sent_weights = copy_to_tensor_model_parallel_region(sent_weights)
        outputs = self._through_experts(sent, sent_weights, chosen.sum(0))
        mixed = unpermute(outputs, order, restore_shape=tokens.shape)

        # Each rank has applied its slice of the experts: sum over ranks.
        if self.config.sequence_parallel:
            mixed = reduce_scatter_to_sequence_parallel_region(mixed.view_as(everywhere))
        else:
            mixed = reduce_from_tensor_model_parallel_region(mixed).view_as(hidden_states)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden_states)

    def _through_experts(
        self, tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Apply experts to tokens [N, H] with weights [N], sorted by expert; counts: tokens per expert."""
        ranks, group = self.ep_group.size(), self.ep_group
        if ranks == 1:
            return self.experts(tokens, counts, weights)[0]

        # Exchange the counts: how many tokens each rank sends to each expert of this rank.
        everyone = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(everyone, counts, group=group)
        arriving = torch.stack(everyone).view(ranks, ranks, -1)[:, group.rank()]  # [from rank, local expert]
        there, here = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()

        # Tokens arrive by rank, then by expert; sort them by expert, then by rank.
        by_rank = torch.arange(arriving.numel(), device=counts.device).view_as(arriving)
        received, received_weights = sort_chunks_by_idxs(
            all_to_all(group, tokens, here, there),
            arriving.flatten(),
            by_rank.T.flatten(),
            probs=all_to_all(group, weights, here, there),
        )
        outputs, _bias = self.experts(received, arriving.sum(0), received_weights)

        # Reverse the sorting and the exchange.
        back, _ = sort_chunks_by_idxs(outputs, arriving.T.flatten(), by_rank.view(-1, ranks).T.flatten())
        return all_to_all(group, back, there, here)
