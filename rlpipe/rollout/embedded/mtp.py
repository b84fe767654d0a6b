"""One MTP layer in the engine: its weights, and drafting one depth with it.

Owns the equations of `models.checkpoint` in the engine's fused form. `model` owns the slots of its keys;
`decoder` and `drafting` decide when a depth runs, and over which tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlpipe.models.base import Layout
from rlpipe.models.checkpoint import mtp_prefix
from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.span import Span, flat_index

if TYPE_CHECKING:
    from rlpipe.rollout.embedded.model import Layer, Model


@dataclass(slots=True)
class MtpLayer:
    """Weights of one layer, ready to multiply."""

    layer: Layer
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    joined: Linear
    final_norm: torch.Tensor
    whole: cpu_kernels.WholeDraft | None = None  # for `cpu_kernels.Kernels.run_draft`

    @classmethod
    def read(cls, model: Model, weights: Mapping[str, torch.Tensor], index: int) -> MtpLayer:
        """Read the layer for a depth, counted from 0."""
        get, prefix, parts = model.getter(weights), mtp_prefix(index), model.arch.draft
        token_norm, hidden_norm, joined, final_norm = (get(prefix + part.hf[0]) for part in parts)

        # In checkpoints without the layout SWAPPED the token's columns are first; `step` needs them last.
        if Layout.SWAPPED not in {part.layout for part in parts}:
            joined = torch.cat(joined.chunk(2, 1)[::-1], 1)
        made = cls(model.layer(get, weights, prefix), token_norm, hidden_norm, Linear(joined), final_norm)
        layer, product = made.layer.whole, made.joined.described()
        if layer is not None and product is not None:
            norms = (norm.data_ptr() for norm in (hidden_norm, token_norm, final_norm))
            made.whole = cpu_kernels.WholeDraft(layer, product, *norms)
        return made

    def step(
        self,
        model: Model,
        depth: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Compute the states of the next depth, [N, H] or [sum B, H]; for the arguments see `Model.draft`."""
        if self.whole is not None and (kernels := model.whole_kernels(hidden, spans)) is not None:
            states = kernels.run_draft(
                self.whole,
                hidden,
                tokens,
                embedding=model.embedding,
                span=spans[0],
                index=model.arch.layers + depth,
                rotations=model.rotations,
            )
            return states if selects is None else states.index_select(0, flat_index(spans, selects))

        embedded = model.norm(model.embedding.index_select(0, tokens), self.token_norm)
        x = self.joined(torch.cat((model.norm(hidden, self.hidden_norm), embedded), -1))
        return model.norm(model.run_draft_layer(self.layer, x, spans, selects, depth=depth), self.final_norm)
