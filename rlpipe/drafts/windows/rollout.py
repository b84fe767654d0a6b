"""A rollout of windows: what was sampled, what was drafted, what verification made of it, and who drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(slots=True, kw_only=True)
class Drawn:
    """W windows, and what is random about the G that are drafted from each.

    owners: [W] row of the micro-batch, ascending. turns, columns: [W] where each anchor stands among the
    turns. scores: [W]. draft_uniforms, coins: [W, G, K] float64, on the CPU.
    """

    owners: np.ndarray
    turns: np.ndarray
    columns: np.ndarray
    scores: torch.Tensor
    draft_uniforms: torch.Tensor
    coins: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Judged:
    """logprobs: [W, G, K, V] of the target where each draft was drawn. The rest [W, G].

    rewards: those of the objective. close: nothing accepted and yet R_dist earned.
    """

    logprobs: torch.Tensor
    num_accepted: torch.Tensor
    rewards: torch.Tensor
    close: torch.Tensor


class WindowDrafter(Protocol):
    """A drafter and its target on some texts that both have read.

    owners: [R] row of the micro-batch that each turn is of. turns, sampled: [R, L], see `DraftBatch`. rows:
    number of each row's trajectory in the batch. draft_cost: what a draft costs against a verify step.
    Every distribution is log-probabilities over the whole vocabulary.
    """

    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    rows: np.ndarray
    draft_cost: float

    def criticality(self) -> torch.Tensor:
        """[R, L] of the first draft from each token of the turns; 0 where none is."""

    def start(self, drawn: Drawn, group: int) -> torch.device:
        """Get ready to go on from the anchors of W windows, `group` times from each; where that is done."""

    def draft(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """[W, G, V] of the drafter after its last tokens [W, G], None at first; with a graph."""

    def first(self) -> torch.Tensor:
        """[W, V] of the target where the first draft stands."""

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """[W, G, K, V] of the target after each of the tokens [W, G, K]."""

    def greedy(self, tokens: torch.Tensor) -> torch.Tensor:
        """[W, V] of the target after one token more, [W], of each greedy window."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What was drafted, and the verdict.

    tokens: [W, G, K]. logprobs: [W, G, K, V] of the drafter where each was drawn, with a graph.
    """

    text: WindowDrafter
    drawn: Drawn
    tokens: torch.Tensor
    logprobs: torch.Tensor
    judged: Judged


def logprobs_of(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logprobs of tokens, [..., V] and [...] -> [...]."""
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
