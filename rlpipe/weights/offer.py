"""Messages between trainer, workers and servers on broadcasts of weights; `transports/` send the bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.canary import DRAFT


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """The meeting point of `size` ranks that form group `name`: rank 0 listens at host:port.

    backend: gloo, nccl, or `transports.ipc.BACKEND`.
    """

    host: str
    port: int
    name: str
    size: int
    backend: str


@dataclass(slots=True, kw_only=True)
class Checksums:
    """Expected fingerprints of all tensors on each rank of a server, by rank (`canary.py`)."""

    ranks: list[dict[str, str]]

    def for_rank(self, rank: int, *, draft: bool) -> dict[str, str]:
        """Return the checksums of one rank by tensor. draft: whether to include the draft."""
        return {name: sum_ for name, sum_ in self.ranks[rank].items() if draft or not name.startswith(DRAFT)}


@dataclass(slots=True, kw_only=True)
class BroadcastResult:
    """Rank 0's result of one broadcast.

    num_bytes: size of the weights. failure: why the broadcast failed, or empty; the weights can still be
    fetched.
    """

    checksums: Checksums
    num_bytes: int
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Member:
    """The id of a server (empty: none answers), and the name of its group (empty: none).

    worker: number of its rollout worker.
    """

    server: str
    group: str
    worker: int = 0


@dataclass(slots=True, kw_only=True)
class Offer:
    """The announcement to rollout workers of an update that the trainer broadcasts to all servers.

    members: ids of the servers in the group, in the order of their ranks. ranks: number of ranks of each
    server. buckets: names, dtypes and shapes (on the meta device) in the order of sending. result: waits for
    the end of the broadcast. weights: gets the same weights from the trainer's memory, for a server that
    could not join; also waits for the end, and raises RuntimeError when the weights are gone.
    """

    version: int
    group: Rendezvous
    members: Sequence[str]
    ranks: int
    buckets: Sequence[Bucket]
    result: Callable[[], Awaitable[BroadcastResult]]
    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]

    def first_rank(self, member: str) -> int:
        """Return the first rank of a server in the group; rank 0 is the trainer's."""
        return 1 + self.members.index(member) * self.ranks
