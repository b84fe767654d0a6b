"""What the trainer of a draft asks of the target: a Protocol, so that drafts import no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Target(Protocol):
    """A model whose passes leave keys in a cache of `rows` rows; `rollout.embedded.model.Model` is one.

    embedding: [V, H]. A span says where the tokens of a pass stand and what they attend to.
    """

    rows: int
    device: torch.device
    embedding: torch.Tensor

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, given by HF name."""
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
        """Tokens at positions [B, q] of the cache's rows first, first + 1, ..."""
        ...

    def forward(self, tokens: torch.Tensor, spans: Sequence[Any]) -> torch.Tensor:
        """tokens [N] -> hidden states [N, H]; writes keys."""
        ...

    def features(
        self, tokens: torch.Tensor, spans: Sequence[Any], layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `forward`; returns also the outputs of some layers side by side [N, len(layers) * H]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V]."""
        ...
