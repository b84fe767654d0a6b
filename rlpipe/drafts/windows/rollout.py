"""Data of a rollout of windows (sampled windows, drafts, verification), and the Protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Protocol, Self, cast

import numpy as np
import torch

from rlpipe.drafts.windows.selection import criticality, learnable_kl

PART_BYTES = {"cuda": 2**27, "cpu": 2**24}  # the drafter's log-probabilities in memory at once


@dataclass(slots=True, kw_only=True)
class SampledWindows:
    """W sampled windows, and the uniform random numbers for the G drafts from each.

    owners: [W] row of the micro-batch, ascending. turns, columns: [W], turn of each anchor and index within
    it. scores: [W]. draft_uniforms, coins: [W, G, K] float64, on the CPU.
    """

    owners: np.ndarray
    turns: np.ndarray
    columns: np.ndarray
    scores: torch.Tensor
    draft_uniforms: torch.Tensor
    coins: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Verified:
    """Result of verifying the drafts; each tensor is [W, G].

    rewards: computed by the objective. gap: distance to the target's greedy window in nats, 0 where R_dist is
    not used. close: whether no draft is accepted but R_dist is earned.
    """

    num_accepted: torch.Tensor
    rewards: torch.Tensor
    gap: torch.Tensor
    close: torch.Tensor


class WindowDrafter(Protocol):
    """A drafter and its target on some texts that both have read.

    owners: [R] row of the micro-batch of each turn. turns, sampled: [R, L], see `DraftBatch`. rows: for each
    row, the number of its trajectory in the batch. vocab: V. Distributions are log-probabilities over the
    full vocabulary. known: tokens of the drafter's vocabulary, None for all. The passes return hidden states.
    `draft_logprobs` and `target_logprobs` compute distributions from some of these, so that at most
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
        """Return the criticality [R, L] of the first draft from each token of the turns, 0 without drafts."""
        ...

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to draft from the anchors of W windows, `group` times from each; return the device."""
        ...

    def draft(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return states [W, G, H] of the drafter after its last tokens [W, G], with a graph.

        In the first call tokens is None and the G drafts of a window share a state: the result is [W, 1, H].
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
        """Append one of the tokens [W] to each greedy window; return the target's states [W, H] after it."""
        ...

    def target_logprobs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the target's distributions from its states: [..., H] -> [..., V]."""
        ...


@dataclass(slots=True, kw_only=True)
class Drafts:
    """Drafts from some windows. Distributions are computed on request and are not stored.

    tokens: [W, G, K]. states: K states of the drafter, one before each draft, with a graph: the first is
    [W, 1, H], the others [W, G, H]. first, read: states of the target, [W, H] at the first draft and
    [W, G, K, H] after each draft. draft_cost: cost of a draft token, in verify steps.
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
        """Compute the drafter's log-probabilities [W, G, K, V] at each draft, with a graph."""
        shape = (*self.tokens.shape[:2], -1)
        return torch.stack([self.text.draft_logprobs(state).expand(shape) for state in self.states], 2)

    @property
    def target_logprobs(self) -> torch.Tensor:
        """Compute the target's log-probabilities [W, G, K + 1, V] at each draft and after the last one."""
        with torch.no_grad():
            first = self.text.target_logprobs(self.first)[:, None, None]
            first = first.expand(-1, self.tokens.shape[1], -1, -1)
            return torch.cat((first, self.text.target_logprobs(self.read)), 2)

    def parts(self) -> list[slice]:
        """Return slices of windows, small enough to have all log-probabilities of a slice in memory."""
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

    states: [N, H] of the drafter. target: [N, H] of the target where it predicts the same tokens. Returns
    [N]. Distributions are computed for parts of the positions, of `PART_BYTES` at most.
    """
    scores = [torch.zeros(0, device=states.device)]
    for part in window_parts(len(states), 1, 1, vocab=text.vocab, device=states.device):
        log_q, log_p = text.draft_logprobs(states[part]), text.target_logprobs(target[part])
        entropy, kl = -(log_p.exp() * log_p).sum(-1), learnable_kl(log_p, log_q, text.known)
        scores.append(criticality(entropy, kl, text.vocab))
    return torch.cat(scores)


def window_parts(windows: int, group: int, depths: int, *, vocab: int, device: torch.device) -> list[slice]:
    """Return slices of windows; the float32 log-probabilities of a slice fit in `PART_BYTES` if possible.

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
