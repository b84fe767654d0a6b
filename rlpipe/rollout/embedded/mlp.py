"""What follows attention in a decoder layer: a gated MLP, or a mixture of them."""

from __future__ import annotations

from collections.abc import Sequence
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
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(slots=True)
class Mixture:
    """Each token through the experts of its highest scores, weighted by a softmax in float32.

    router: [experts, H].
    """

    experts: Experts
    router: torch.Tensor
    members: Sequence[GatedMlp]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x.float(), self.router.float()).softmax(-1)
        weights, chosen = scores.topk(self.experts.per_token)
        if self.experts.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen, order = chosen.flatten().sort(stable=True)
        tokens = order // self.experts.per_token
        sizes = chosen.bincount(minlength=len(self.members)).tolist()
        sent = x.index_select(0, tokens).split(sizes)
        found = [mlp(part) for mlp, part in zip(self.members, sent, strict=True) if len(part)]
        weighted = torch.cat(found).float() * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, weighted).to(x.dtype)
