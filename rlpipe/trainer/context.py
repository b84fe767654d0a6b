"""Context parallelism: the tokens of one micro-batch lie on several ranks.

A flat micro-batch of N tokens (`batching.micro_batch`) is cut into 2 R equal chunks for R ranks; rank r has
the r-th from the front and the r-th from the back, so that all have about the same number of earlier tokens
to attend to. A chunk that begins inside a branch begins a branch that follows it. Two parts of a model need
other ranks. Attention gathers their keys and values, and its gradient sums what all of them have for each
key. A delta net, which goes over all tokens in order, does so for a share of its heads
(`ContextSuccession`).
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
    """This rank's tokens of a micro-batch, whose attention reads the keys of all ranks.

    tokens: [n] this rank reads, which lie at `places` of the padded micro-batch; n is the same on all ranks.
    mine: the branches of the cut that they make, by index.
    """

    def __init__(
        self,
        micro: MicroBatch,
        group: dist.ProcessGroup,
        device: torch.device,
        replay: Replay | None = None,
        multiple: int = 1,
    ) -> None:
        """Cut a micro-batch. replay: the experts that read each of its tokens. multiple: of chunks' sizes."""
        ranks, count = group.size(), len(micro.tokens)
        size = -(-count // (2 * ranks * multiple)) * multiple
        padding = 2 * ranks * size - count
        branches = [*micro.branches, Branch(length=padding, context=[])] if padding else micro.branches
        chunks = np.arange(2 * ranks * size).reshape(2 * ranks, size)
        everywhere = np.concatenate([np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(ranks)])
        self.places = everywhere.reshape(ranks, -1)[group.rank()]
        cut = cut_branches(branches, size)
        starts = np.cumsum([0, *(branch.length for branch in cut)])[:-1]
        self.mine = np.flatnonzero(np.isin(starts // size, self.places // size)).tolist()
        self._group, self._whole = group, branches
        self._order = torch.from_numpy(np.argsort(everywhere)).to(device)
        self._ranks = torch.from_numpy(everywhere).to(device)
        self._count = count
        self.tokens = np.pad(micro.tokens, (0, padding))[self.places]
        positions = np.concatenate([micro.positions, np.arange(padding)])
        if replay is not None:  # padding has no record
            routes = replay.padded(padding).routes
            replay = Replay(routes[torch.from_numpy(self.places).to(device)], replay.unrecorded)
        super().__init__(cut, torch.from_numpy(positions[self.places]).to(device), replay=replay)

    @cached_property
    def succession(self) -> Succession:
        """Which tokens of the whole micro-batch follow which."""
        return ContextSuccession(self._whole, self._group, self._order, self._ranks)

    def attend(
        self, attention: CausalAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """This rank's tokens attend to those of all ranks that they follow; all [1, heads, n, d]."""
        pairs = torch.cat([key, value]).permute(2, 0, 1, 3).contiguous()  # [n, 2, groups, d]
        keys, values = self._of_all(pairs).permute(1, 2, 0, 3).split(1)
        return self.attend_to(attention, query, keys, values, self.mine)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] of the micro-batch's tokens from each rank's [n, H]; its gradient is the sum over ranks."""
        return self._of_all(hidden)[: self._count]

    def _of_all(self, mine: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [R n, ...] in order of the micro-batch."""
        return gather_from_sequence_parallel_region(mine, group=self._group).index_select(0, self._order)


class ContextSuccession(Succession):
    """Succession of a micro-batch's tokens, of which ranks exchange their parts for shares of the heads.

    order: where each token is among those of all ranks, one rank after the other. ranks: the inverse.
    """

    def __init__(
        self, branches: Sequence[Branch], group: dist.ProcessGroup, order: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        super().__init__(branches, order.device)
        self._group, self._order, self._ranks = group, order, ranks

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, d] of this rank's tokens -> [N, heads / R, d] of all."""
        everywhere = all_to_all_sp2hp(x.flatten(1), self._group)
        return everywhere.index_select(0, self._order).unflatten(1, (-1, x.shape[2]))

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[N, heads / R, d] of all tokens -> [n, heads, d] of this rank's."""
        mine = all_to_all_hp2sp(x.flatten(1).index_select(0, self._ranks), self._group)
        return mine.unflatten(1, (-1, x.shape[2]))

    def share(self, weight: torch.Tensor) -> torch.Tensor:
        """One of R equal parts of the rows, of which gradients are summed over the ranks."""
        return weight.chunk(self._group.size())[self._group.rank()]


def cut_branches(branches: Sequence[Branch], size: int) -> list[Branch]:
    """The same tokens as branches that end, at the latest, where a chunk of `size` tokens does.

    >>> whole = [Branch(length=4, context=[]), Branch(length=2, context=[(0, 3)])]
    >>> [(branch.length, branch.context) for branch in cut_branches(whole, 3)]
    [(3, []), (1, [(0, 3)]), (2, [(0, 3)])]
    """
    cut: list[Branch] = []
    pieces: list[Path] = []  # of each branch given
    start = 0
    for branch in branches:
        context = [piece for j, count in branch.context for piece in first_tokens(pieces[j], count)]
        pieces.append([])
        end = start + branch.length
        while start < end:
            length = min(end, (start // size + 1) * size) - start
            cut.append(Branch(length=length, context=[*context, *pieces[-1]]))
            pieces[-1].append((len(cut) - 1, length))
            start += length
    return cut
