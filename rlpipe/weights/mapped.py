"""Weights in memory of the process that holds them, which servers of the same GPU, or of the same host, map.

    trainer, in turn with the servers:  lay bucket n, say where  ...  every server has it: lay bucket n + 1
    a server's rollout worker:          ask where  -->  have the server load it  -->  say so

No byte passes through a worker, nor, on a GPU, through the host. Says both by a store that the trainer opens;
sessions, versions and checks are `sync.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.collective import GroupBroken, Rendezvous
from rlpipe.weights.device_memory import DeviceMemory
from rlpipe.weights.protocols import ServerError
from rlpipe.weights.shared import HostMemory, fill, laid

BACKEND = "ipc"  # of a `Rendezvous` that is not one of torch.distributed
_POLL_SECONDS = 0.001


class MappedRoot:
    """The holder's end, with the interface of `collective.Root`.

    members: ranks of the servers in the group, each server's first. device: where the memory is. plan: the
    buckets of an update, on the meta device: the memory is as large as the largest.
    """

    def __init__(
        self,
        host: str,
        members: Sequence[int],
        timeout: float,
        device: torch.device,
        plan: Sequence[Bucket],
    ) -> None:
        self._members, self._timeout = members, timeout
        wait = timedelta(seconds=timeout)
        self._store = dist.TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
        self.rendezvous = Rendezvous(
            host=host,
            port=self._store.port,
            name=f"rlpipe-{uuid.uuid4().hex[:8]}",
            size=1 + len(members),
            backend=BACKEND,
        )
        self._memory = DeviceMemory(device) if device.type == "cuda" else HostMemory()
        self._memory.grow(max(laid(bucket)["bytes"] for bucket in plan))
        self._number = 0
        self.left = False

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Bring buckets to every server, one after the other; see `Root.send`."""
        until = time.monotonic() + self._timeout if deadline is None else deadline
        try:
            if self.left:
                raise RuntimeError("it was left")
            for bucket in buckets:
                self._number += 1
                said = laid(bucket)
                fill(self._memory.bytes, bucket, said)
                self._store.set(str(self._number), json.dumps(self._memory.where()))
                self._wait(until)
        except (RuntimeError, dist.DistError) as error:
            self.close()
            raise GroupBroken(f"the group of {self.rendezvous.size} broke off: {error}") from error

    def _wait(self, until: float) -> None:
        """For all servers to have the bucket."""
        answers = [f"{self._number} {member}" for member in self._members]
        self._store.wait(answers, timedelta(seconds=max(0.001, until - time.monotonic())))
        if failures := {self._store.get(answer) for answer in answers} - {b""}:
            raise RuntimeError(min(failures).decode())

    def close(self) -> None:
        """Free the memory; a server that still maps it keeps it until it maps another."""
        if not self.left:
            self.left = True
            self._memory.close()


class Taker:
    """A server's end, in its rollout worker. rank: of the server in the group."""

    def __init__(self, group: Rendezvous, rank: int, timeout: float) -> None:
        self._store = dist.TCPStore(group.host, group.port, timeout=timedelta(seconds=timeout))
        self._rank, self._number = rank, 0

    async def where(self) -> dict[str, Any]:
        """Memory of the next bucket, when it is laid. Raises ServerError when its holder is gone."""
        self._number += 1
        try:
            while not await asyncio.to_thread(self._store.check, [str(self._number)]):
                await asyncio.sleep(_POLL_SECONDS)
            return json.loads(await asyncio.to_thread(self._store.get, str(self._number)))
        except dist.DistError as error:
            raise ServerError(f"the trainer's store: {error}") from error

    async def taken(self, failure: str = "") -> None:
        """Tell that the server has it, or why it has not."""
        await asyncio.to_thread(self._store.set, f"{self._number} {self._rank}", failure)
