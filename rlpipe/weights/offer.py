"""Messages of trainer, workers and servers about a broadcast of weights; `transports/` move the bytes."""

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
    """Fingerprints of all tensors as each rank of a server must hold them, by rank (`canary.py`)."""

    ranks: list[dict[str, str]]

    def for_rank(self, rank: int, *, draft: bool) -> dict[str, str]:
        """Return the checksums of one rank by tensor; draft: those of the draft among them."""
        return {name: sum_ for name, sum_ in self.ranks[rank].items() if draft or not name.startswith(DRAFT)}


@dataclass(slots=True, kw_only=True)
class BroadcastResult:
    """Rank 0's result of one broadcast.

    num_bytes: of the weights. failure: why it broke off, or empty; the weights can still be fetched.
    """

    checksums: Checksums
    num_bytes: int
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Member:
    """A server by its id (empty: none answers), and the name of its group (empty: none).

    worker: number of its rollout worker.
    """

    server: str
    group: str
    worker: int = 0


@dataclass(slots=True, kw_only=True)
class Offer:
    """One update that the trainer broadcasts to all servers, as its rollout workers receive it.

    members: ids of the servers in the group, in the order of their ranks. ranks: of each server.
    buckets: names, types and shapes (on the meta device) in the order of sending.
    result: waits for the end of the broadcast. weights: the same weights from the trainer's memory, for a
        server that could not take part; also waits for the end, and raises RuntimeError when they are gone.
    """

    version: int
    group: Rendezvous
    members: Sequence[str]
    ranks: int
    buckets: Sequence[Bucket]
    result: Callable[[], Awaitable[BroadcastResult]]
    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]

    def first_rank(self, member: str) -> int:
        """Return the first rank of one server in the group; rank 0 is the trainer's."""
        return 1 + self.members.index(member) * self.ranks
