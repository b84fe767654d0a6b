"""Weights by collective broadcast: who holds them is rank 0, the ranks of the servers are the others.

    once per membership:  Root and its store  <--/init_weights_update_group-->  each rank joins
    for each bucket:       its bytes, broadcast --/update_weights_from_distributed-->  received, loaded

NCCL returns before it is done, and then hangs instead of raising. So each call is made on a thread of its own
and waited for up to a deadline of the host; after that the communicator is aborted and the thread left
behind, and whoever holds the weights goes on.

Two holders: the trainer's first rank, for all servers at once (`Offer`: nothing passes through a rollout
worker), and a rollout worker, for the ranks of its own server. Owns the group and what is said about buckets;
sessions, versions and checks are `sync.py`'s.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.canary import DRAFT

_POLL_SECONDS = 0.0005  # between two looks at a broadcast
_ABORT_SECONDS = 10.0  # for leaving a group


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
    """A server by its id (empty: none answers), and the name of the group it is in (empty: none)."""

    server: str
    group: str


@dataclass(slots=True, kw_only=True)
class Offer:
    """One update that the trainer broadcasts to all servers, as its rollout workers are told of it.

    members: ids of the servers in the group, in the order of their ranks. ranks: of each server.
    buckets: names, types and shapes (on the meta device) of what comes, in order.
    sent: waits for the end of it. weights: the same weights from the trainer's memory, for a server that
        could not take part; waits for the end too, raises RuntimeError when they are gone.
    """

    version: int
    group: Rendezvous
    members: Sequence[str]
    ranks: int
    buckets: Sequence[Bucket]
    sent: Callable[[], Awaitable[Sent]]
    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]

    def first_rank(self, member: str) -> int:
        """Ranks of one server in the group."""
        return 1 + self.members.index(member) * self.ranks


class Group:
    """Rank 0's end of a torch process group apart from the default one. Its calls return at once."""

    def __init__(self, host: str, ranks: int, timeout: float, backend: str) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._store = dist.TCPStore(
            host, 0, 1 + ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        name = f"rlpipe-{uuid.uuid4().hex[:8]}"
        self.place = Rendezvous(host=host, port=self._store.port, name=name, size=1 + ranks, backend=backend)
        self._group: dist.ProcessGroup | None = None
        self._left = False

    @property
    def ended(self) -> bool:
        """Whether it was left, also with all groups of this process, which a trainer ends when it stops."""
        return self._left or (self._group is not None and self._group not in c10d._world.pg_map)

    def join(self) -> Future[None]:
        """Done when all ranks have joined."""
        return _on_thread(self._join)

    def broadcast(self, flat: torch.Tensor) -> Future[None]:
        """Done when every rank has the bytes, and not before: the device is asked."""
        return _on_thread(self._broadcast, flat)

    def leave(self) -> Future[None]:
        """Abort what is under way and leave; a server leaves when it is told to, or with its process."""
        self._left = True
        group, self._group = self._group, None
        return _on_thread(_end, group)

    def _join(self) -> None:
        """What SGLang's `init_custom_process_group` does, as rank 0."""
        place = self.place
        # the watchdog of NCCL ends the process: our deadline comes first
        timeout = timedelta(days=1) if place.backend == "nccl" else self._timeout
        group, _ = c10d._new_process_group_helper(
            place.size,
            0,
            [],
            dist.Backend(place.backend),
            dist.PrefixStore(place.name, self._store),
            group_name=place.name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place.size)}
        if self._left:
            _end(group)
        else:
            self._group = group

    def _broadcast(self, flat: torch.Tensor) -> None:
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        while not (self._left or work.is_completed()):
            time.sleep(_POLL_SECONDS)
        if not self._left:
            work.wait()  # raises what it failed of


class Root:
    """Rank 0 of a group with `ranks` others, in the process that holds the weights; its calls block.

    host: an address of this machine that they reach. timeout: seconds for joining and sending, where `send`
    is given no deadline. gloo broadcasts from host memory; nccl from the GPU, where no two ranks may share
    one.
    """

    def __init__(self, host: str, ranks: int, timeout: float, backend: str = "gloo") -> None:
        self._timeout, self._group = timeout, Group(host, ranks, timeout, backend)
        self.rendezvous = self._group.place
        self._joined = self._left = False

    @property
    def left(self) -> bool:
        """Whether there is no group any more."""
        return self._left or self._group.ended

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Send buckets to every rank, one after the other; the first ever waits for all ranks to join.

        deadline: of the monotonic clock, until which the ranks have all of them. Leaves the group and raises
        GroupBroken when a rank is missing, and when there was no group any more.
        """
        until = time.monotonic() + self._timeout if deadline is None else deadline
        try:
            if self.left:
                raise RuntimeError("it was left")
            if not self._joined:
                self._wait(self._group.join(), until)
                self._joined = True
            for bucket in buckets:
                self._wait(self._group.broadcast(self._flat(bucket)), until)
        except (RuntimeError, dist.DistError, TimeoutError) as error:
            self.close()
            reason = str(error) or "a rank did not answer in time"
            raise GroupBroken(f"the group of {self.rendezvous.size} ranks broke off: {reason}") from error

    def _wait(self, call: Future[None], until: float) -> None:
        call.result(max(0.0, until - time.monotonic()))

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        flat = torch.cat(
            [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in _aligned(bucket)]
        )
        return flat if self.rendezvous.backend == "nccl" else flat.cpu()

    def close(self) -> None:
        """Leave the group, aborting what hangs there; an abort that hangs itself is left behind."""
        if not self._left:
            self._left = True
            with contextlib.suppress(Exception):
                self._group.leave().result(_ABORT_SECONDS)


def _end(group: dist.ProcessGroup | None) -> None:
    """Abort and destroy a group, unless a trainer in this process ended all of them when it stopped."""
    if group in c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):  # not every backend can
            group.abort()
        dist.destroy_process_group(group)


def _on_thread(function: Callable[..., None], *args: Any) -> Future[None]:
    """Call it on a thread that may be left behind."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:
            future.set_exception(error.with_traceback(None))  # whose frames would keep the group alive
        else:
            future.set_result(None)

    threading.Thread(target=run, name="rlpipe-broadcast", daemon=True).start()
    return future


def described(bucket: Bucket, group: str) -> dict[str, Any]:
    """Describe a bucket that `Root.send` broadcasts to a server; the tensors may be on the meta device."""
    bucket = _aligned(bucket)
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


def _aligned(bucket: Bucket) -> Bucket:
    """Largest types first: SGLang wants each tensor aligned to its type."""
    return sorted(bucket, key=lambda pair: -pair[1].itemsize)
