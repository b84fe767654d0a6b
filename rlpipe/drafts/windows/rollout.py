"""Data of a rollout of windows: sampled windows, drafts, verification; and the Protocol of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(slots=True, kw_only=True)
class SampledWindows:
    """W windows, and the uniforms of the G drafts from each.

    owners: [W] row of the micro-batch, ascending. turns, columns: [W] indices of each anchor among the turns.
    scores: [W]. draft_uniforms, coins: [W, G, K] float64, on the CPU.
    """

    owners: np.ndarray
    turns: np.ndarray
    columns: np.ndarray
    scores: torch.Tensor
    draft_uniforms: torch.Tensor
    coins: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Verified:
    """Verification of the drafts; [W, G] except logprobs.

    logprobs: [W, G, K, V] of the target at each draft. rewards: those of the objective. close: no draft is
    accepted, and yet R_dist is earned.
    """

    logprobs: torch.Tensor
    num_accepted: torch.Tensor
    rewards: torch.Tensor
    close: torch.Tensor


class WindowDrafter(Protocol):
    """A drafter and its target on some texts that both have read.

    owners: [R] row of the micro-batch of each turn. turns, sampled: [R, L], see `DraftBatch`. rows:
    number of each row's trajectory in the batch. draft_cost: what a draft costs against a verify step.
    Every distribution is log-probabilities over the full vocabulary.
    """

    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    rows: np.ndarray
    draft_cost: float

    def criticality(self) -> torch.Tensor:
        """Return [R, L]: the criticality of the first draft from each token of the turns; 0 where none is."""
        ...

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to draft from the anchors of W windows, `group` times from each; return the device."""
        ...

    def draft(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return [W, G, V] of the drafter after its last tokens [W, G], None at first; with a graph."""
        ...

    def first(self) -> torch.Tensor:
        """Return [W, V] of the target at the first draft."""
        ...

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [W, G, K, V] of the target after each of the tokens [W, G, K]."""
        ...

    def greedy(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token [W] to each greedy window; return [W, V] of the target after it."""
        ...


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Drafts from some windows, and their verification.

    tokens: [W, G, K]. logprobs: [W, G, K, V] of the drafter at each draft, with a graph.
    """

    text: WindowDrafter
    windows: SampledWindows
    tokens: torch.Tensor
    logprobs: torch.Tensor
    verified: Verified


def logprobs_of(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Select the log-probabilities of tokens: [..., V] and [...] -> [...]."""
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
