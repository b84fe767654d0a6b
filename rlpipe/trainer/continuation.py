"""Windows that go on from a pass that is over: they read its keys and values instead of running it again.

Owns who attends to whom among them. Knows neither what the tokens are nor which model runs: the backbone's
layers and the MTP layer call `attend` alike. Gradients flow into the kept keys where those have a graph.

    kept pass     p p p p a a a a b b
    windows       W prefixes, each continued G times, q tokens at a time:   w0g0 w0g1 .. w1g0 w1g1 ..
    attention     prefix of its window | what its own continuation read before | its q tokens, causally
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from rlpipe.trainer.layers import CausalAttention, Kept

AT_ONCE = 2**23  # numbers of the keys that are gathered at once


class Continuation(PackedSeqParams):
    """G continuations of each of W prefixes on their way to attention, like `BranchLayout`.

    positions, reach: of the tokens at hand, set by `advance`; a prefix of n tokens goes on at position n.
    """

    def __init__(self, kept: Kept, prefixes: Sequence[torch.Tensor], group: int = 1) -> None:
        """kept: of the pass that read the prefixes. prefixes: W indices [n] into its tokens, in order."""
        super().__init__(qkv_format="continuation")
        self._kept, self._prefixes, self._group = kept, list(prefixes), group
        self._own: Kept = {}
        self._at_once: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        self._read = 0
        self._starts = np.array([len(prefix) for prefix in prefixes])

    def advance(self, count: int) -> Continuation:
        """Get ready for the next `count` tokens of every continuation: a pass over [W * G * count] tokens."""
        ahead = self._starts[:, None, None] + self._read + np.arange(count)
        self.positions = np.broadcast_to(ahead, (len(ahead), self._group, count)).flatten()
        self._read += count
        self.reach = int(self._starts.max()) + self._read
        return self

    def attend(
        self, attention: CausalAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [1, heads, W * G * q, d], key and value [1, groups, W * G * q, d] -> as query."""
        shape = (len(self._prefixes), self._group, -1)
        query, *own = (x[0].unflatten(1, shape) for x in (query, key, value))  # [heads, W, G, q, d]
        if attention in self._own:
            own = [torch.cat(pair, 3) for pair in zip(self._own[attention], own, strict=True)]
        self._own[attention] = own[0], own[1]
        siblings = self._siblings(query, own[0].shape[3])
        outputs = []
        for rows, index, absent in self._batches(key.shape[1] * key.shape[3]):
            keys, values = (
                torch.cat((_gathered(kept[0], index), mine[:, rows].transpose(0, 1).flatten(2, 3)), 2)
                for kept, mine in zip(self._kept[attention], own, strict=True)
            )
            prefix = torch.zeros_like(absent, dtype=query.dtype).masked_fill(absent, -torch.inf)
            sizes = len(index), 1, len(siblings), -1
            mask = torch.cat((prefix[:, None, None].expand(*sizes), siblings.expand(*sizes)), 3)
            found = attention.attend(query[:, rows].transpose(0, 1).flatten(2, 3), keys, values, mask)
            outputs.append(found.transpose(0, 1).flatten(1, 2))
        return torch.cat(outputs, 1)[None]

    def _batches(self, width: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Prefixes that are read at once: their rows, their indices [w, C] padded with 0, what is padding.

        width: numbers of a key.
        """
        if not self._at_once:
            step = max(1, AT_ONCE // (int(self._starts.max()) * width))
            for start in range(0, len(self._prefixes), step):
                rows = slice(start, start + step)
                index = torch.nn.utils.rnn.pad_sequence(self._prefixes[rows], batch_first=True)
                lengths = torch.tensor(self._starts[rows], device=index.device)
                absent = torch.arange(index.shape[1], device=index.device) >= lengths[:, None]
                self._at_once.append((rows, index, absent))
        return self._at_once

    def _siblings(self, query: torch.Tensor, read: int) -> torch.Tensor:
        """Additive mask [G * q, G * read]: a continuation sees its own tokens, causally, and no sibling's."""
        count = query.shape[3]
        causal = torch.ones(count, read, device=query.device).tril(read - count)
        seen = torch.kron(torch.eye(self._group, device=query.device), causal)
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill(seen == 0, -torch.inf)


def _gathered(kept: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[groups, N, d] at [w, C] -> [w, groups, C, d]."""
    return kept.index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)
