"""`weight_transfer=collective`: broadcasts weights in a process group (NCCL or gloo).

Rank 0 is the trainer, for all servers at once, or a worker, for the ranks of its server.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.offer import Rendezvous
from rlpipe.weights.process_group import GroupBroken, Root, describe_bucket, describe_join
from rlpipe.weights.protocols import Server, ServerError, ServerUnreachable
from rlpipe.weights.session import WeightSession
from rlpipe.weights.transports.base import Audience, BroadcastRoot, WeightUpdate
from rlpipe.weights.transports.group import GroupTransport


class BroadcastTransport(GroupTransport):
    """Makes the ranks of the server receive buckets in a group of torch.distributed."""

    def __init__(self, session: WeightSession) -> None:
        super().__init__(session)
        self._root: Root | None = None  # rank 0 of the group with only this server

    @classmethod
    def open_root(cls, audience: Audience) -> BroadcastRoot:
        """Open the group, with nccl if weights and servers are on GPUs, else with gloo."""
        backend = "nccl" if audience.on_gpu and audience.device.type == "cuda" else "gloo"
        ranks, device = audience.servers * audience.ranks, audience.device
        if backend == "gloo":
            device = torch.device("cpu")
        return Root(audience.host, ranks=ranks, timeout=audience.timeout, backend=backend, device=device)

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Broadcast target and draft as rank 0 of a group with only this server. Raises ServerError."""
        session = self._session
        sent = session.buckets(update.weights)
        root = await self._own_root(client)

        requests = session.requests(sent, version=update.version, flush=update.flush)
        sending = asyncio.ensure_future(asyncio.to_thread(root.send, sent))
        loading = asyncio.ensure_future(self._load_all(client, requests, group=root.rendezvous, first_rank=1))
        try:
            await asyncio.wait({sending, loading}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (sending, loading):
                if task.done():
                    await task
        except BaseException as error:
            # Leave the group first, so that neither side waits for the other.
            self.close()
            for task in (sending, loading):
                task.cancel()
            await asyncio.gather(sending, loading, return_exceptions=True)
            if isinstance(error, GroupBroken):
                raise ServerUnreachable(str(error)) from error
            raise

    def close(self) -> None:
        """Leave the group with only this server, if there is one."""
        if self._root is not None:
            self._root.close()
            self._root = None

    async def _own_root(self, client: Server) -> Root:
        """Return rank 0 of the group with only this server; make a new group if the server is not in it."""
        if self._root is None or self._root.left or self.group_of(client) != self._root.rendezvous.name:
            self.close()
            sglang, timeout = self._session.config.sglang, self._session.timeout
            self._root = await asyncio.to_thread(Root, sglang.host, ranks=sglang.tp, timeout=timeout)
        return self._root

    async def _join(self, client: Server, group: Rendezvous, first_rank: int) -> None:
        body = describe_join(group, first_rank)
        await client.post("/init_weights_update_group", body, self._session.timeout)

    async def _leave(self, client: Server) -> None:
        if group_name := self.group_of(client):
            with contextlib.suppress(ServerError):
                timeout = self._session.config.sglang.health_timeout
                await client.post("/destroy_weights_update_group", {"group_name": group_name}, timeout)
        self._joined = None

    async def _load(self, client: Server, bucket: Bucket, body: dict[str, Any]) -> None:
        assert self._joined is not None
        body |= describe_bucket(bucket, self._joined[1])
        await client.post("/update_weights_from_distributed", body, self._session.timeout)
