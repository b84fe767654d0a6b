"""Context parallelism: the tokens of one micro-batch are spread over several ranks.

A flat micro-batch of N tokens (`batching.micro_batch`) is cut into 2 R equal chunks for R ranks. Rank r has
the r-th chunk from the front and the r-th from the back, so that all ranks have about the same number of
earlier tokens to attend to. Where a chunk begins inside a branch, the branch is cut in two. Two kinds of
layers exchange data between ranks. Attention gathers the keys and values of all ranks, and sums the gradients
of all ranks for each key. A delta net must read all tokens in order, so each rank runs it over all tokens for
a share of the heads (`ContextSuccession`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
)

from rlpipe.batching.micro_batch import Branch, MicroBatch, Path, first_tokens
from rlpipe.trainer.delta_net import Succession
from rlpipe.trainer.experts import Replay
from rlpipe.trainer.layers import BranchLayout, CausalAttention


class ContextLayout(BranchLayout):
    """This rank's tokens of a micro-batch; their attention reads the keys of all ranks.

    tokens: [n], this rank's tokens, at `indices` of the padded micro-batch; n is the same on all ranks.
    local_branches: indices of this rank's branches among all branches after the cut.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        replay: Replay | None = None,
        multiple: int = 1,
    ) -> None:
        """Cut a micro-batch. replay: its tokens' recorded experts. multiple: divisor of chunk sizes."""
        # Chunks of equal size need padding, which is a separate branch.
        ranks, count = group.size(), len(micro_batch.tokens)
        size = -(-count // (2 * ranks * multiple)) * multiple
        padding = 2 * ranks * size - count
        branches = (
            [*micro_batch.branches, Branch(length=padding, context=[])] if padding else micro_batch.branches
        )

        # Indices of all tokens, one rank after the other: the r-th chunk from the front and from the back.
        chunks = np.arange(2 * ranks * size).reshape(2 * ranks, size)
        by_rank = np.concatenate([np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(ranks)])
        self.indices = by_rank.reshape(ranks, -1)[group.rank()]

        # After the cut every branch is in one chunk, and therefore on one rank.
        cut = cut_branches(branches, size)
        starts = np.cumsum([0, *(branch.length for branch in cut)])[:-1]
        self.local_branches = np.flatnonzero(np.isin(starts // size, self.indices // size)).tolist()

        self._group, self._all_branches, self._count = group, branches, count
        self._order = torch.from_numpy(np.argsort(by_rank)).to(device)
        self._ranks = torch.from_numpy(by_rank).to(device)

        # This rank's tokens, positions and routes; padding has no record of routes.
        self.tokens = np.pad(micro_batch.tokens, (0, padding))[self.indices]
        positions = np.concatenate([micro_batch.positions, np.arange(padding)])
        if replay is not None:
            routes = replay.padded(padding).routes
            replay = Replay(routes[torch.from_numpy(self.indices).to(device)], replay.unrecorded)
        super().__init__(cut, torch.from_numpy(positions[self.indices]).to(device), replay=replay)

    @cached_property
    def succession(self) -> Succession:
        """The order of all tokens of the micro-batch."""
        return ContextSuccession(self._all_branches, self._group, order=self._order, ranks=self._ranks)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attention: CausalAttention
    ) -> torch.Tensor:
        """Attend from this rank's tokens to the tokens they follow on all ranks; all [1, heads, n, d]."""
        # Gather keys and values with one collective.
        pairs = torch.cat([key, value]).permute(2, 0, 1, 3).contiguous()  # [n, 2, groups, d]
        keys, values = self._gather_ranks(pairs).permute(1, 2, 0, 3).split(1)
        return self.attend_to(query, keys, values, attention=attention)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather the micro-batch's states [N, H] from [n, H] of each rank; gradients add up over ranks."""
        return self._gather_ranks(hidden)[: self._count]

    def _gather_ranks(self, local: torch.Tensor) -> torch.Tensor:
        """Gather [n, ...] of each rank into [R n, ...] in the order of the micro-batch."""
        return gather_from_sequence_parallel_region(local, group=self._group).index_select(0, self._order)


class ContextSuccession(Succession):
    """The succession for context parallelism: ranks exchange shares of the tokens for shares of the heads.

    order: index of each token of the micro-batch in the concatenated tokens of all ranks. ranks: the inverse
    permutation.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        group: dist.ProcessGroup,
        *,
        order: torch.Tensor,
        ranks: torch.Tensor,
    ) -> None:
        super().__init__(branches, order.device)
        self._group, self._order, self._ranks = group, order, ranks

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [n, heads, d] of this rank's tokens for [N, heads / R, d] of all tokens."""
        all_tokens = all_to_all_sp2hp(x.flatten(1), self._group)
        return all_tokens.index_select(0, self._order).unflatten(1, (-1, x.shape[2]))

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [N, heads / R, d] of all tokens for [n, heads, d] of this rank's tokens."""
        local = all_to_all_hp2sp(x.flatten(1).index_select(0, self._ranks), self._group)
        return local.unflatten(1, (-1, x.shape[2]))

    def share(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the rows, [n, ...] -> [n / R, ...]; gradients are summed over ranks."""
        return weight.chunk(self._group.size())[self._group.rank()]


def cut_branches(branches: Sequence[Branch], size: int) -> list[Branch]:
    """Cut branches at the ends of chunks of `size` tokens, so that none crosses from one chunk to the next.

    >>> branches = [Branch(length=4, context=[]), Branch(length=2, context=[(0, 3)])]
    >>> [(branch.length, branch.context) for branch in cut_branches(branches, 3)]
    [(3, []), (1, [(0, 3)]), (2, [(0, 3)])]
    """
    cut: list[Branch] = []
    paths: list[Path] = []  # the parts of each original branch
    start = 0

    for branch in branches:
        context = [part for j, count in branch.context for part in first_tokens(paths[j], count)]

        # Every part attends to the context of the original branch and to the branch's earlier parts.
        paths.append([])
        end = start + branch.length
        while start < end:
            length = min(end, (start // size + 1) * size) - start
            cut.append(Branch(length=length, context=[*context, *paths[-1]]))
            paths[-1].append((len(cut) - 1, length))
            start += length
    return cut
