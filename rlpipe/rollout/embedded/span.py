"""A span of a forward pass: cache rows that all have the same number of new tokens.

Owns the views of the cache and the slots in it; `model` makes spans and runs layers over several spans at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rlpipe.rollout.embedded.attention import Piece


@dataclass(slots=True, kw_only=True)
class Tables:
    """What torch's operations read of a span.

    slots: [B, q, keys and values], index in a layer's flat cache of each key and value head of a token.
    rotation: [B, q, D/2] complex64. mask: 0 or -inf, [B, q, L]; with pieces, expanded by
    `attention.expand_mask`.
    """

    slots: torch.Tensor
    rotation: torch.Tensor
    mask: torch.Tensor


@dataclass(kw_only=True)
class Span:
    """`batch` consecutive rows with `width` new tokens each; shared by all layers of a pass.

    first: first row. positions: [B, q] int64, RoPE position of each token. places: [B, q] int64, slot in its
    row of each token's key. unseen: [B, q, L] bool, the slots that a token must not attend to; None if it
    sees all slots up to its position. seen: view of the slots to attend to, [layers, keys and values, B,
    heads, L, D]; with latent attention, keys are also the values, and with pieces B and heads are one
    dimension. pieces: groups of rows that attend together in two batched products; if empty, one kernel runs
    over all rows. contexts: [B] int64, how many keys of each row `cpu_kernels` reads; None if it is not used.
    decoding: whether the rows are the first rows of the cache and have the few tokens of a decode step. make:
    computes `tables` when they are first read, because a pass of the kernels does not read them.
    """

    batch: int
    width: int
    first: int
    positions: torch.Tensor
    places: torch.Tensor
    unseen: torch.Tensor | None
    pieces: tuple[Piece, ...]
    seen: torch.Tensor
    make: Callable[[Span], Tables]
    contexts: torch.Tensor | None = None
    decoding: bool = False

    @cached_property
    def tables(self) -> Tables:
        """Slots, rotations and mask."""
        return self.make(self)

    @cached_property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """The keys of each layer."""
        return self.seen[:, 0].unbind(0)

    @cached_property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The values of each layer."""
        return self.seen[:, -1].unbind(0)

    @property
    def tokens(self) -> int:
        """Number of tokens, B * q."""
        return self.batch * self.width

    def columns(self, start: int, stop: int) -> Span:
        """Return the span of only the tokens start..stop - 1 of each row."""
        part = slice(start, stop)
        return replace(
            self,
            width=stop - start,
            positions=self.positions[:, part],
            places=self.places[:, part],
            unseen=None if self.unseen is None else self.unseen[:, part],
        )

    def selected_mask(self, select: torch.Tensor) -> torch.Tensor:
        """Return the mask for one token per row; select: [B] int64."""
        mask = self.tables.mask
        if self.pieces:
            # An expanded mask has one entry per row and key head.
            select = select.repeat_interleave(len(mask) // self.batch)
        return mask[torch.arange(len(mask), device=select.device), select].unsqueeze(1)


def join(spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flattened slots of a pass's keys and values, and rotations [N, 1, D/2] of its tokens."""
    slots = [span.tables.slots.flatten() for span in spans]
    rotations = [span.tables.rotation.flatten(0, 1).unsqueeze(1) for span in spans]
    return (slots[0], rotations[0]) if len(spans) == 1 else (torch.cat(slots), torch.cat(rotations))


def flat_index(spans: Sequence[Span], selects: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, for one token per row, its index among the tokens of a pass: [rows of all spans] int64.

    selects: per span, [B] int64, index of a token of each row within the span.
    """
    flat, start = [], 0
    for span, select in zip(spans, selects, strict=True):
        flat.append(select + torch.arange(start, start + span.tokens, span.width, device=select.device))
        start += span.tokens
    return flat[0] if len(flat) == 1 else torch.cat(flat)
