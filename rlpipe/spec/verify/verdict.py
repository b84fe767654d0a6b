"""Results of the verification rules, all of which are lossless: tokens have the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Result of verifying one chain of drafts.

    num_accepted: [B] int64 in 0..gamma. next_token: [B] int64, emitted after the accepted drafts.
    accept_prob: [B, gamma] in [0, 1], a probability of acceptance over the coins; each rule defines it.
    """

    num_accepted: torch.Tensor
    next_token: torch.Tensor
    accept_prob: torch.Tensor


@dataclass(slots=True, kw_only=True)
class TreeVerdict:
    """Result of verifying a tree of drafts (`rlpipe.spec.tree.Tree`, N drafts, depth D).

    num_accepted: [B] int64 in 0..D. next_token: [B] int64, emitted after the accepted path.
    path: [B, D] int64, the accepted nodes from depth 1 on, -1 beyond num_accepted.
    accept_prob: [B, N] in [0, 1], probability that node n is accepted, given that its parent was accepted
    and its earlier siblings were rejected.
    """

    num_accepted: torch.Tensor
    next_token: torch.Tensor
    path: torch.Tensor
    accept_prob: torch.Tensor

    @property
    def kv_source(self) -> torch.Tensor:
        """[B, D] int64: the keys and values of node kv_source[:, i] must move to slot i + 1 after the root's.

        Equals `path`, with i + 1 (the same slot) instead of -1. A source is never before its destination, so
        copying in ascending order never reads an overwritten slot.
        """
        slots = torch.arange(1, self.path.shape[1] + 1, device=self.path.device)
        return torch.where(self.path < 0, slots, self.path)
