"""`weight_transfer=ipc`: servers on the trainer's GPU (CUDA IPC) or host map a trainer rank's memory.

    trainer:            write bucket n, publish its location  ...  every server has it: write bucket n + 1
    a server's worker:  wait for the location  -->  make the server load it  -->  acknowledge

No weights pass through a worker. If ranks and servers share GPUs (`cluster.share_gpus`), each rank does this
with the server on its own GPU. Locations and acknowledgements are exchanged through a store that the rank
opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: public, and documented

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.device_memory import DeviceMemory, memory_of
from rlpipe.weights.offer import Rendezvous
from rlpipe.weights.process_group import GroupBroken, on_stream
from rlpipe.weights.protocols import Server, ServerError
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared_memory import HostMemory, encode_layout, layout_of, write_bucket
from rlpipe.weights.transports.base import Audience, BroadcastRoot, WeightUpdate
from rlpipe.weights.transports.group import GroupTransport
from rlpipe.weights.transports.shared import SharedMemoryTransport

BACKEND = "ipc"  # backend of a `Rendezvous` that does not use torch.distributed
_POLL_SECONDS = 0.001


class IpcTransport(GroupTransport):
    """Makes the server map the trainer's memory; for `send`, the worker shares memory of its own."""

    def __init__(self, session: WeightSession) -> None:
        super().__init__(session)
        self._without_trainer = SharedMemoryTransport(session)
        self._member: IpcMember | None = None

    @classmethod
    def open_root(cls, audience: Audience) -> BroadcastRoot:
        """Allocate the memory, on the device of the trainer's weights."""
        return IpcRoot(audience)

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together, from the worker's memory. Raises ServerError."""
        await self._without_trainer.send(client, update)

    def close(self) -> None:
        """Free the memory shared with the server."""
        self._without_trainer.close()

    async def _join(self, client: Server, group: Rendezvous, first_rank: int) -> None:
        timeout = self._session.timeout
        self._member = await asyncio.to_thread(IpcMember, group, first_rank, timeout=timeout)

    async def _leave(self, client: Server) -> None:
        if self._member is not None:
            # Report the failure, as the trainer waits for this server; the trainer itself may be gone.
            with contextlib.suppress(dist.DistError):
                await self._member.acknowledge("a server did not take it")
            self._member = None
        self._joined = None

    async def _load(self, client: Server, bucket: Bucket, body: dict[str, Any]) -> None:
        assert self._member is not None
        location = await self._member.wait_for_bucket()
        await self._session.load_mapped(client, [encode_layout(location | layout_of(bucket))], body)
        await self._member.acknowledge()


class IpcRoot:
    """The trainer's side: memory as large as the largest bucket, which all servers map."""

    def __init__(self, audience: Audience) -> None:
        self._first_ranks = range(1, 1 + audience.servers * audience.ranks, audience.ranks)
        self._timeout = audience.timeout
        timeout = timedelta(seconds=audience.timeout)
        self._store = TCPStore(audience.host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        self.rendezvous = Rendezvous(
            host=audience.host,
            port=self._store.port,
            name=f"rlpipe-{uuid.uuid4().hex[:8]}",
            size=1 + audience.servers,
            backend=BACKEND,
        )

        on_gpu = audience.device.type == "cuda"
        # Use a stream that training steps do not use.
        self._stream = torch.cuda.Stream(audience.device) if on_gpu else None
        self._memory: DeviceMemory | HostMemory = memory_of(audience.device) if on_gpu else HostMemory()
        self._memory.reserve(max(layout_of(bucket)["bytes"] for bucket in audience.buckets))
        self._number = 0  # number of the bucket that was written last
        self.left = False

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Send buckets to every server, one after the other; see `Root.send`."""
        until = time.monotonic() + self._timeout if deadline is None else deadline
        try:
            if self.left:
                raise RuntimeError("it was left")

            for bucket in buckets:
                # All servers read the same memory, so the next bucket waits for the slowest server.
                self._number += 1
                with on_stream(self._stream):
                    write_bucket(self._memory.bytes, bucket, layout_of(bucket))
                if self._stream is not None:
                    self._stream.synchronize()
                self._store.set(str(self._number), json.dumps(self._memory.location()))
                self._wait_for_all(until)
        except (RuntimeError, dist.DistError) as error:
            self.close()
            raise GroupBroken(f"the group of {self.rendezvous.size} broke off: {error}") from error

    def _wait_for_all(self, until: float) -> None:
        """Wait until all servers have loaded the bucket."""
        answers = [f"{self._number} {rank}" for rank in self._first_ranks]
        self._store.wait(answers, timedelta(seconds=max(0.001, until - time.monotonic())))
        if failures := {self._store.get(answer) for answer in answers} - {b""}:
            raise RuntimeError(min(failures).decode())

    def close(self) -> None:
        """Free shared host memory, which stays valid for servers that map it; keep GPU memory."""
        if not self.left:
            self.left = True
            if isinstance(self._memory, HostMemory):
                self._memory.close()


class IpcMember:
    """A server's side, in its rollout worker. first_rank: the server's first rank in the group."""

    def __init__(self, group: Rendezvous, first_rank: int, *, timeout: float) -> None:
        self._store = TCPStore(group.host, group.port, timeout=timedelta(seconds=timeout))
        self._first_rank = first_rank
        self._number = 0  # number of the current bucket

    async def wait_for_bucket(self) -> dict[str, Any]:
        """Wait for the next bucket and return its location. Raises ServerError when the trainer is gone."""
        self._number += 1
        try:
            while not await asyncio.to_thread(self._store.check, [str(self._number)]):
                await asyncio.sleep(_POLL_SECONDS)
            return json.loads(await asyncio.to_thread(self._store.get, str(self._number)))
        except dist.DistError as error:
            raise ServerError(f"the trainer's store: {error}") from error

    async def acknowledge(self, failure: str = "") -> None:
        """Report that the server has loaded the bucket, or the failure."""
        await asyncio.to_thread(self._store.set, f"{self._number} {self._first_rank}", failure)
