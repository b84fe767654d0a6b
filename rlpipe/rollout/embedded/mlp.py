"""The MLP of a decoder layer: one gated MLP, or an MoE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlpipe.models.base import Experts
from rlpipe.rollout.embedded.linear import Linear


@dataclass(slots=True)
class GatedMlp:
    """down(silu(gate x) * up x), x [N, H]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        if self.down.kernels is not None:
            return self.down(self.down.kernels.gate(both))
        gate, up = both.chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(slots=True)
class Mixture:
    """MoE layer: each token uses its highest-scoring experts, weighted by a softmax or sigmoids in float32.

    router: [experts, H]. shared: expert for every token. bias: [experts] float32, added to the scores only
    for the choice. chosen: [N, experts per token], the choice in the last call.
    """

    experts: Experts
    router: torch.Tensor
    members: Sequence[GatedMlp]
    shared: GatedMlp | None = None
    bias: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for tokens [n, H], and set `chosen` to the experts of each token."""
        scores = F.linear(x.float(), self.router.float())
        scores = scores.softmax(-1) if self.bias is None else scores.sigmoid()
        chosen = self._allowed(scores if self.bias is None else scores + self.bias)
        self.chosen = chosen = chosen.topk(self.experts.per_token).indices
        weights = scores.gather(1, chosen)
        if self.experts.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.experts.scaling

        # Sort the tokens by expert, so that each expert runs once, over all of its tokens.
        chosen, order = chosen.flatten().sort(stable=True)
        tokens = order // self.experts.per_token
        sizes = chosen.bincount(minlength=len(self.members)).tolist()

        sent = x.index_select(0, tokens).split(sizes)
        outputs = [mlp(part) for mlp, part in zip(self.members, sent, strict=True) if len(part)]
        weighted = torch.cat(outputs).float() * weights.flatten()[order].unsqueeze(-1)
        mixed = torch.zeros(x.shape, device=x.device).index_add_(0, tokens, weighted).to(x.dtype)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [N, experts], with -inf for experts in groups that the token does not choose."""
        if self.experts.groups == 1:
            return scores

        # The score of a group is the sum of its two highest scores.
        grouped = scores.unflatten(1, (self.experts.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(self.experts.groups_per_token).indices
        barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(barred.unsqueeze(-1), -torch.inf).flatten(1)


def last_routes(mlps: Iterable[GatedMlp | Mixture]) -> torch.Tensor:
    """Return each token's experts in the last pass: [N, layers with experts, experts per token]."""
    return torch.stack([mlp.chosen for mlp in mlps if isinstance(mlp, Mixture)], 1)
