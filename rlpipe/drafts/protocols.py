"""Protocols of the models that a draft's trainer runs, so that drafts import no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch


class Target(Protocol):
    """A model with a key cache of `rows` rows that its passes fill, such as `rollout.embedded.model.Model`.

    embedding: [V, H]. A span describes a pass: the positions of its tokens, and what they attend to.
    """

    rows: int
    device: torch.device
    embedding: torch.Tensor

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, by HF name."""
        ...

    def span(
        self,
        first: int,
        positions: torch.Tensor,
        context: int | np.ndarray,
        *,
        slots: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
    ) -> Any:
        """Make the span of tokens at positions [B, q] of the cache's rows first, first + 1, ..."""
        ...

    def forward(self, tokens: torch.Tensor, spans: Sequence[Any]) -> torch.Tensor:
        """Compute hidden states [N, H] of tokens [N]; writes keys."""
        ...

    def features(
        self, tokens: torch.Tensor, spans: Sequence[Any], layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `forward`; return also the outputs of some layers, concatenated [N, len(layers) * H]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [N, H] -> [N, V]."""
        ...


class Shape(Protocol):
    """Dimensions of a draft.

    layers: the target's layers whose outputs the draft reads. vocab: the target's vocabulary size.
    """

    layers: Sequence[int]
    vocab: int


class TrainableDraft(Protocol):
    """A torch module that drafts, such as `drafts.eagle3_model.Eagle3`, which also has PPOW's methods.

    prefix: added to the names of its state dict when its weights are sent together with the target's.
    """

    prefix: str
    shape: Shape

    def unroll(self, features: torch.Tensor, embeddings: torch.Tensor) -> list[torch.Tensor]:
        """Compute K states [B, T, H] of all anchors.

        features: [B, T, layers * H]. embeddings: [K, B, T, H] of the tokens after each anchor.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits: [..., H] -> [..., V]."""
        ...

    def save(self, path: str | Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a directory for engines (`spec.draft_path`); weights: the draft's state dict."""
        ...
