"""Alignment of sequences with depths: the tokens and anchors that a loss compares, [N, K].

Depth k (1-based) at anchor t reads tokens up to t + k. Draft and target (the backbone at position t + k)
both predict token t + k + 1. An engine's verify step at anchor t knows token t + 1 and drafts t + 2
onwards. So the first step of a turn that begins at token s has the anchor s - 1, the last prompt token: the
turn's first token comes from the prefill and is never drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class DepthTargets:
    """Alignment of B sequences of T tokens with K depths; N = B * T anchors, row-major.

    tokens: [N, K] int64, the token that depth k + 1 (0-based k) predicts; 0 where masked.
    mask: [N, K] bool, whether that token is drafted: sampled, and in the turn that the anchor drafts.
    turn_starts: [B, T] bool, anchors at which a turn's first verify step starts.
    """

    tokens: Tensor
    mask: Tensor
    turn_starts: Tensor


def depth_targets(tokens: Tensor, sampled: Tensor, depths: int) -> DepthTargets:
    """Align all anchors of some sequences: tokens, mask and turn starts.

    tokens: [B, T] int64. sampled: [B, T] bool, the tokens that the model sampled (not prompt, not
    padding); a turn is a run of sampled tokens. If sequences are packed into one row, there must be an
    unsampled token between turns.

    >>> targets = depth_targets(torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 0]]).bool(), depths=2)
    >>> targets.mask.int().tolist()  # token 2 is sampled by the prefill; 3 and 4 are drafted
    [[0, 0], [1, 1], [1, 0], [0, 0], [0, 0], [0, 0]]
    >>> targets.tokens[1].tolist(), targets.turn_starts.nonzero().tolist()
    ([3, 4], [[0, 1]])
    """
    batch, length = tokens.shape
    width = length + depths + 1
    drafted = torch.zeros(batch, width, dtype=torch.bool, device=tokens.device)
    drafted[:, 1:length] = sampled[:, 1:] & sampled[:, :-1]  # any token of a turn but its first
    padded = torch.nn.functional.pad(tokens, (0, width - length))
    ahead = torch.arange(2, depths + 2, device=tokens.device)
    columns = torch.arange(length, device=tokens.device)[:, None] + ahead
    mask = drafted[:, columns].cumprod(-1).bool()  # [B, T, K]; a chain ends with its turn

    active = mask[..., 0]
    starts = active.clone()
    starts[:, 1:] &= ~active[:, :-1]
    return DepthTargets(
        tokens=(padded[:, columns] * mask).flatten(0, 1), mask=mask.flatten(0, 1), turn_starts=starts
    )
