"""`weight_transfer=ipc`: through the trainer's memory, mapped by servers of its GPU (CUDA IPC) or host."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import torch.distributed as dist

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.collective import Rendezvous
from rlpipe.weights.mapped import MappedRoot, Taker
from rlpipe.weights.protocols import Server
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared import encoded, laid
from rlpipe.weights.transports.base import Audience, BroadcastRoot, WeightUpdate
from rlpipe.weights.transports.group import GroupTransport
from rlpipe.weights.transports.shared import SharedMemoryTransport


class IpcTransport(GroupTransport):
    """Has the server map the trainer's memory; a worker that sends by itself shares memory of its own."""

    def __init__(self, session: WeightSession) -> None:
        super().__init__(session)
        self._alone = SharedMemoryTransport(session)
        self._taker: Taker | None = None

    @classmethod
    def open_root(cls, audience: Audience) -> BroadcastRoot:
        """Allocate the memory, on the device of the trainer's weights."""
        first_ranks = range(1, 1 + audience.servers * audience.ranks, audience.ranks)
        return MappedRoot(audience.host, first_ranks, audience.timeout, audience.device, audience.buckets)

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together, without the trainer. Raises ServerError."""
        await self._alone.send(client, update)

    def close(self) -> None:
        """Free the memory shared with the server."""
        self._alone.close()

    async def _join(self, client: Server, group: Rendezvous, first_rank: int) -> None:
        self._taker = await asyncio.to_thread(Taker, group, first_rank, self._session.timeout)

    async def _leave(self, client: Server) -> None:
        if self._taker is not None:
            with contextlib.suppress(dist.DistError):  # the trainer may be gone
                await self._taker.taken("a server did not take it")
            self._taker = None
        self._joined = None

    async def _load(self, client: Server, bucket: Bucket, body: dict[str, Any]) -> None:
        assert self._taker is not None
        memory = await self._taker.where()
        await self._session.load_mapped(client, encoded(memory | laid(bucket)), body)
        await self._taker.taken()
