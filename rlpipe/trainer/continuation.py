"""Windows that continue a finished pass: they read the pass's keys and values instead of repeating it.

Defines which of the windows' tokens attend to which, for any tokens and any model. The layers of the backbone
and the MTP layer both call `attend`. Gradients flow into the retained keys if these have a graph.

    finished pass p p p p a a a a b b
    windows       W prefixes, each continued G times, q tokens at a time:   w0g0 w0g1 .. w1g0 w1g1 ..
    attention     prefix of its window | earlier tokens of the same continuation | its q tokens, causally
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from rlpipe.trainer.layers import CausalAttention, RetainedKeys

GATHERED_ELEMENTS = 2**23  # limit of the keys that are gathered at once


class Continuation(PackedSeqParams):
    """G continuations of each of W prefixes, as attention receives them, like `BranchLayout`.

    positions: positions of the current tokens. reach: upper bound of all positions. `advance` sets both. A
    prefix of n tokens continues at position n.
    """

    def __init__(self, retained: RetainedKeys, prefixes: Sequence[torch.Tensor], *, group: int = 1) -> None:
        """Continue a pass.

        retained: keys and values of the pass that read the prefixes. prefixes: for each of W prefixes the
        indices [n] of its tokens in the pass, in order. group: G.
        """
        super().__init__(qkv_format="continuation")
        self._retained, self._prefixes, self._group = retained, list(prefixes), group
        self._window_keys: RetainedKeys = {}
        self._gather_plan: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        self._read = 0
        self._starts = np.array([len(prefix) for prefix in prefixes])

    def advance(self, count: int) -> Continuation:
        """Prepare for the next `count` tokens of every continuation: a pass over [W * G * count] tokens."""
        ahead = self._starts[:, None, None] + self._read + np.arange(count)
        self.positions = np.broadcast_to(ahead, (len(ahead), self._group, count)).flatten()
        self._read += count
        self.reach = int(self._starts.max()) + self._read
        return self

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attention: CausalAttention
    ) -> torch.Tensor:
        """Attend: query [1, heads, W * G * q, d], key, value [1, groups, W * G * q, d] -> shape of query."""
        shape = (len(self._prefixes), self._group, -1)
        query, *current = (x[0].unflatten(1, shape) for x in (query, key, value))  # [heads, W, G, q, d]

        # Append this call's keys and values to those of the continuations' earlier tokens.
        if attention in self._window_keys:
            current = [torch.cat(pair, 3) for pair in zip(self._window_keys[attention], current, strict=True)]
        self._window_keys[attention] = current[0], current[1]

        siblings = self._siblings(query, current[0].shape[3])
        outputs = []

        for rows, index, absent in self._batches(key.shape[1] * key.shape[3]):
            keys, values = (
                torch.cat((_gathered(retained[0], index), window[:, rows].transpose(0, 1).flatten(2, 3)), 2)
                for retained, window in zip(self._retained[attention], current, strict=True)
            )

            # Mask the padding of shorter prefixes, and the tokens of siblings.
            prefix = torch.zeros_like(absent, dtype=query.dtype).masked_fill(absent, -torch.inf)
            sizes = len(index), 1, len(siblings), -1
            mask = torch.cat((prefix[:, None, None].expand(*sizes), siblings.expand(*sizes)), 3)
            queries = query[:, rows].transpose(0, 1).flatten(2, 3)

            attended = attention.attend(queries, keys, values, mask=mask)
            outputs.append(attended.transpose(0, 1).flatten(1, 2))

        return torch.cat(outputs, 1)[None]

    def _batches(self, width: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Plan which prefixes are read at once: a slice of prefixes, padded indices [w, C], and padding mask.

        width: elements of a key. The plan is made once and used in every layer.
        """
        if not self._gather_plan:
            step = max(1, GATHERED_ELEMENTS // (int(self._starts.max()) * width))
            for start in range(0, len(self._prefixes), step):
                rows = slice(start, start + step)
                index = torch.nn.utils.rnn.pad_sequence(self._prefixes[rows], batch_first=True)
                lengths = torch.tensor(self._starts[rows], device=index.device)
                absent = torch.arange(index.shape[1], device=index.device) >= lengths[:, None]
                self._gather_plan.append((rows, index, absent))
        return self._gather_plan

    def _siblings(self, query: torch.Tensor, read: int) -> torch.Tensor:
        """Make an additive mask [G * q, G * read]: each continuation attends only to itself, causally."""
        count = query.shape[3]
        causal = torch.ones(count, read, device=query.device).tril(read - count)
        seen = torch.kron(torch.eye(self._group, device=query.device), causal)
        return torch.zeros_like(seen, dtype=query.dtype).masked_fill(seen == 0, -torch.inf)


def _gathered(retained: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather [groups, N, d] at [w, C] -> [w, groups, C, d]."""
    return retained.index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)
