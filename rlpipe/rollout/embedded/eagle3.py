"""The EAGLE-3 draft in the engine: one layer that reads features of the target and uses the engine's cache.

Owns the draft's weights and its step; the equations are in `drafts.eagle3_model`, the module used in
training. The draft is read from a separate directory, except the embedding, which is the target's. If the
draft is co-trained (draft.train=online), its weights come with each update of the target. Otherwise they do
not change: decoding remains lossless, but the acceptance rate falls until the draft is trained again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.eagle3 import PREFIX, Eagle3Shape
from rlpipe.drafts.eagle3_model import draft_ids, read_draft
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.span import Span


class Eagle3Draft:
    """Weights of a draft, ready to multiply once `attach` has been called.

    layers: indices of the target layers whose outputs are its features. ids: its vocabulary; None for all.
    """

    prefix = PREFIX

    def __init__(self, shape: Eagle3Shape, weights: Mapping[str, torch.Tensor]) -> None:
        self._shape, self._weights = shape, weights
        self.layers = shape.layers
        self.ids: torch.Tensor | None = None

    @classmethod
    def read(cls, path: str | Path, target: Mapping[str, Any]) -> Eagle3Draft:
        """Read a draft from a directory with `read_draft`; target: the target's `config.json`."""
        return cls(*read_draft(path, target))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the draft's weights, by their names in an update of the target."""
        return {f"{PREFIX}{name}": shape for name, shape in self._shape.weight_shapes().items()}

    def attach(self, model: Model) -> None:
        """Copy the weights to the model's device and layout."""
        self.load(model, self._weights)
        self._weights = {}  # the model has copies

    def load(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, by the names of the draft's checkpoint."""
        get = model.getter(weights)
        self._fc = Linear(get("fc.weight"))

        self._layer = model.layer(get, weights, "midlayer.", qk_norm=False)
        self._hidden_norm = get("midlayer.hidden_norm.weight")
        self._norm = get("norm.weight")

        self._head = Linear(get("lm_head.weight"))
        ids = draft_ids(weights["d2t"].long()) if self._shape.reduced else None
        self.ids = None if ids is None else ids.to(model.device)

    def step(
        self,
        model: Model,
        tokens: torch.Tensor,
        state: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run a step of the draft. state: [N, H], fused features or the draft's states of the step before."""
        embedded = model.norm(model.embedding.index_select(0, tokens), self._layer.input_norm)
        both = torch.cat((embedded, model.norm(state, self._hidden_norm)), -1)
        return model.run_draft_layer(self._layer, state, spans, selects, read=both)

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse the outputs [N, H] of each layer in `layers` into the input [N, H] of the first step."""
        return self._fc(torch.cat(features, -1))

    def logits(self, model: Model, state: torch.Tensor) -> torch.Tensor:
        """Compute logits [N, D] over the draft's vocabulary."""
        return self._head(model.norm(state, self._norm))
