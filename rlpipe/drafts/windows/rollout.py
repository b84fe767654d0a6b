"""Data of a rollout of windows: sampled windows, drafts, verification; and the Protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Protocol, Self, cast

import numpy as np
import torch

from rlpipe.drafts.windows.selection import criticality, learnable_kl

PART_BYTES = {"cuda": 2**27, "cpu": 2**24}  # of the drafter's log-probabilities held at once


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
    """Verification of the drafts, each [W, G].

    rewards: those of the objective. gap: distance to the target's greedy window in nats, 0 where R_dist is
    not used. close: R_dist is earned although no draft is accepted.
    """

    num_accepted: torch.Tensor
    rewards: torch.Tensor
    gap: torch.Tensor
    close: torch.Tensor


class WindowDrafter(Protocol):
    """A drafter and its target on some texts that both have read.

    owners: [R] row of the micro-batch of each turn. turns, sampled: [R, L], see `DraftBatch`. rows:
    number of each row's trajectory in the batch. vocab: V of every distribution, which is log-probabilities
    over the full vocabulary. known: tokens of the drafter's vocabulary, None for all. Passes return hidden
    states; `draft_logprobs` and `target_logprobs` compute distributions from some of them, so that at most
    `PART_BYTES` of distributions exist at once.
    """

    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    rows: np.ndarray
    vocab: int
    known: torch.Tensor | None

    @property
    def draft_cost(self) -> float:
        """Return the cost of a drafted token, in verify steps."""
        ...

    def criticality(self) -> torch.Tensor:
        """Return [R, L]: the criticality of the first draft from each token of the turns; 0 without one."""
        ...

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to draft from the anchors of W windows, `group` times from each; return the device."""
        ...

    def draft(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return states of the drafter after its last tokens [W, G]: [W, G, H], with a graph.

        At first tokens is None, and the G drafts of a window share a state: [W, 1, H].
        """
        ...

    def draft_logprobs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the drafter's distributions from its states: [..., H] -> [..., V]."""
        ...

    def first(self) -> torch.Tensor:
        """Return states [W, H] of the target at the first draft."""
        ...

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return states [W, G, K, H] of the target after each of the tokens [W, G, K]."""
        ...

    def greedy(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token [W] to each greedy window; return states [W, H] of the target after it."""
        ...

    def target_logprobs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the target's distributions from its states: [..., H] -> [..., V]."""
        ...


@dataclass(slots=True, kw_only=True)
class Drafts:
    """Drafts from some windows. Distributions are computed on request, and not stored.

    tokens: [W, G, K]. states: of the drafter before each draft, with a graph, [W, 1, H] and then K - 1 times
    [W, G, H]. first, read: states of the target, [W, H] at the first draft and [W, G, K, H] after each draft.
    draft_cost: of a draft, in verify steps.
    """

    text: WindowDrafter
    windows: SampledWindows
    tokens: torch.Tensor
    states: Sequence[torch.Tensor]
    first: torch.Tensor
    read: torch.Tensor
    draft_cost: float

    @property
    def logprobs(self) -> torch.Tensor:
        """Compute [W, G, K, V] of the drafter at each draft; with a graph."""
        shape = (*self.tokens.shape[:2], -1)
        return torch.stack([self.text.draft_logprobs(state).expand(shape) for state in self.states], 2)

    @property
    def target_logprobs(self) -> torch.Tensor:
        """Compute [W, G, K + 1, V] of the target at each draft and after the last one."""
        with torch.no_grad():
            first = self.text.target_logprobs(self.first)[:, None, None]
            first = first.expand(-1, self.tokens.shape[1], -1, -1)
            return torch.cat((first, self.text.target_logprobs(self.read)), 2)

    def parts(self) -> list[slice]:
        """Return slices of the windows whose log-probabilities may be held at once."""
        return window_parts(*self.tokens.shape, vocab=self.text.vocab, device=self.tokens.device)

    def part(self, rows: slice) -> Self:
        """Select some windows."""
        windows = self.windows
        return replace(
            self,
            windows=SampledWindows(
                owners=windows.owners[rows],
                turns=windows.turns[rows],
                columns=windows.columns[rows],
                scores=windows.scores[rows],
                draft_uniforms=windows.draft_uniforms[rows],
                coins=windows.coins[rows],
            ),
            tokens=self.tokens[rows],
            states=[state[rows] for state in self.states],
            first=self.first[rows],
            read=self.read[rows],
        )


@dataclass(slots=True, kw_only=True)
class Rollout(Drafts):
    """Drafts from some windows, and their verification."""

    verified: Verified

    def part(self, rows: slice) -> Self:
        """Select some windows, with their verification."""
        fields = {f.name: getattr(self.verified, f.name)[rows] for f in dataclass_fields(Verified)}
        # A dataclass with slots has no zero-argument super().
        parts = cast("Self", Drafts.part(self, rows))
        return replace(parts, verified=Verified(**fields))


def criticality_of(text: WindowDrafter, states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the criticality of positions, for any vocabulary of the drafter (`learnable_kl`).

    states: of the drafter [N, H]. target: of the target, where it predicts the same tokens [N, H]. Returns
    [N]; distributions of as many positions as `PART_BYTES` holds exist at once.
    """
    scores = [torch.zeros(0, device=states.device)]
    for part in window_parts(len(states), 1, 1, vocab=text.vocab, device=states.device):
        log_q, log_p = text.draft_logprobs(states[part]), text.target_logprobs(target[part])
        entropy, kl = -(log_p.exp() * log_p).sum(-1), learnable_kl(log_p, log_q, text.known)
        scores.append(criticality(entropy, kl, text.vocab))
    return torch.cat(scores)


def window_parts(windows: int, group: int, depths: int, *, vocab: int, device: torch.device) -> list[slice]:
    """Return slices of windows, at least one each, whose float32 log-probabilities fill `PART_BYTES`.

    >>> window_parts(5, 8, 3, vocab=2**16, device=torch.device("cpu"))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, PART_BYTES[device.type] // (4 * group * depths * vocab))
    return [slice(first, min(first + step, windows)) for first in range(0, windows, step)]


def kl_sum(draft_logprobs: torch.Tensor, target_logprobs: torch.Tensor) -> torch.Tensor:
    """Sum KL(draft || target) over drafts, in nats and without a gradient: [..., V] twice -> scalar."""
    log_q = draft_logprobs.detach()
    return (log_q.exp() * (log_q - target_logprobs)).sum(dtype=torch.float64)


def logprobs_of(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Select the log-probabilities of tokens: [..., V] and [...] -> [...]."""
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
