"""Weights by collective broadcast: who holds them is rank 0, the ranks of the servers are the others.

    once per membership:  Root and its store  <--/init_weights_update_group-->  each rank joins
    for each piece:       its bytes, broadcast --/update_weights_from_distributed-->  received, loaded

Two holders: the trainer's first rank, for all servers at once (`Offer`: nothing passes through a rollout
worker), and a rollout worker, for the ranks of its own server. Owns the group and what is said about pieces;
sessions, versions and checks are `sync.py`'s.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.canary import DRAFT


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """Where `size` ranks meet as group `name`: rank 0 listens at host:port. backend: gloo or nccl."""

    host: str
    port: int
    name: str
    size: int
    backend: str

    def body(self, first_rank: int) -> dict[str, Any]:
        """What a server is asked: its ranks are first_rank and those after it."""
        return {
            "master_address": self.host,
            "master_port": self.port,
            "rank_offset": first_rank,
            "world_size": self.size,
            "group_name": self.name,
            "backend": self.backend,
        }


class GroupBroken(RuntimeError):
    """A rank did not join, or was lost."""


@dataclass(slots=True, kw_only=True)
class Checksums:
    """Fingerprints of all tensors as each rank of a server must hold them, by rank (`canary.py`)."""

    ranks: list[dict[str, str]]

    def of(self, rank: int, draft: bool) -> dict[str, str]:
        """Names and sums of one rank, without those of the draft where there is none."""
        return {name: one for name, one in self.ranks[rank].items() if draft or not name.startswith(DRAFT)}


@dataclass(slots=True, kw_only=True)
class Sent:
    """What rank 0 says of an update it broadcast.

    num_bytes: of the weights. failure: why it broke off; the weights can still be asked for.
    """

    checksums: Checksums
    num_bytes: int
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Member:
    """A server by its id, and the name of the group it is in (empty: none)."""

    server: str
    group: str


@dataclass(slots=True, kw_only=True)
class Offer:
    """One update that the trainer broadcasts to all servers, as its rollout workers are told of it.

    members: ids of the servers in the group, in the order of their ranks. ranks: of each server.
    pieces: names, types and shapes (on the meta device) of what comes, in order.
    sent: waits for the end of it. weights: the same weights from the trainer's memory, for a server that
        could not take part; waits for the end too, raises RuntimeError when they are gone.
    """

    version: int
    group: Rendezvous
    members: Sequence[str]
    ranks: int
    pieces: Sequence[Bucket]
    sent: Callable[[], Awaitable[Sent]]
    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]

    def first_rank(self, member: str) -> int:
        """Ranks of one server in the group."""
        return 1 + self.members.index(member) * self.ranks


class Root:
    """Rank 0 of a group with `ranks` others, in the process that holds the weights; its calls block.

    host: an address of this machine that they reach. timeout: seconds for joining and for each piece.
    gloo broadcasts from host memory; nccl from the GPU, where no two ranks may share one.
    """

    def __init__(self, host: str, ranks: int, timeout: float, backend: str = "gloo") -> None:
        self._timeout = timedelta(seconds=timeout)
        self._store = dist.TCPStore(
            host, 0, 1 + ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        name = f"rlpipe-{uuid.uuid4().hex[:8]}"
        self.rendezvous = Rendezvous(
            host=host, port=self._store.port, name=name, size=1 + ranks, backend=backend
        )
        self._group: dist.ProcessGroup | None = None

    def send(self, pieces: Iterable[Bucket]) -> None:
        """Send pieces to every rank, one after the other; the first ever waits for all ranks to join.

        Leaves the group and raises GroupBroken when a rank is missing.
        """
        try:
            if self._group is None:
                self._group = self._join()
            for piece in pieces:
                self._broadcast(piece)
        except (RuntimeError, dist.DistError) as error:
            self.close()
            raise GroupBroken(f"the group of {self.rendezvous.size} ranks broke off: {error}") from error

    def _broadcast(self, piece: Bucket) -> None:
        flat = torch.cat(
            [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in _aligned(piece)]
        )
        on_gpu = self.rendezvous.backend == "nccl"
        dist.broadcast(flat if on_gpu else flat.cpu(), src=0, group=self._group)

    def close(self) -> None:
        """Leave the group; a server leaves when it is told to, or with its process."""
        if self._group in c10d._world.pg_map:  # a trainer in this process ends all groups when it stops
            dist.destroy_process_group(self._group)
        self._group = None

    def _join(self) -> dist.ProcessGroup:
        """Join a group apart from the default one (SGLang's `init_custom_process_group`)."""
        place = self.rendezvous
        group, _ = c10d._new_process_group_helper(
            place.size,
            0,
            [],
            dist.Backend(place.backend),
            dist.PrefixStore(place.name, self._store),
            group_name=place.name,
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place.size)}
        return group


def described(piece: Bucket, group: str) -> dict[str, Any]:
    """What a server is told of a piece that `Root.broadcast` sends; the tensors may be on the meta device."""
    piece = _aligned(piece)
    return {
        "names": [name for name, _ in piece],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
        "shapes": [list(tensor.shape) for _, tensor in piece],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


def _aligned(piece: Bucket) -> Bucket:
    """Largest types first: SGLang wants each tensor aligned to its type."""
    return sorted(piece, key=lambda pair: -pair[1].itemsize)
