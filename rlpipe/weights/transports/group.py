"""Base of transports in which the server joins a group and another process has the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.offer import BroadcastResult, Offer, Rendezvous
from rlpipe.weights.protocols import Server, ServerError
from rlpipe.weights.session import WeightSession
from rlpipe.weights.transports.base import Transport


class GroupTransport(Transport):
    """Receives broadcasts of the trainer; subclasses join and leave a kind of group, and load buckets."""

    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._joined: tuple[Server, str] | None = None  # the server, and the name of its group

    async def _join(self, client: Server, group: Rendezvous, first_rank: int) -> None:
        raise NotImplementedError

    async def _leave(self, client: Server) -> None:
        """Leave the group; errors are ignored, as a broken group cannot always be left in order."""
        raise NotImplementedError

    async def _load(self, client: Server, bucket: Bucket, body: dict[str, Any]) -> None:
        raise NotImplementedError

    def group_of(self, client: Server) -> str:
        """Return the name of the group that the server is in; empty for none."""
        return self._joined[1] if self._joined is not None and self._joined[0] is client else ""

    async def receive(self, client: Server, offer: Offer, member: str, *, flush: bool) -> BroadcastResult:
        """Make the server load the weights that the trainer broadcasts; see `Transport.receive`."""
        requests = self._session.requests(offer.buckets, version=offer.version, flush=flush)
        first_rank = offer.first_rank(member)
        loading = asyncio.ensure_future(
            self._load_all(client, requests, group=offer.group, first_rank=first_rank)
        )
        sending = asyncio.ensure_future(offer.result())

        try:
            await asyncio.wait({loading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
            result = await sending

            # After a failure, the server waits for buckets that will not be sent.
            if result.failure:
                raise ServerError(f"the trainer's broadcast of version {offer.version}: {result.failure}")
            await loading
        except BaseException:
            for task in (loading, sending):
                task.cancel()
            await asyncio.gather(loading, sending, return_exceptions=True)
            await self._leave(client)
            raise
        return result

    async def _load_all(
        self,
        client: Server,
        requests: Iterable[tuple[Bucket, dict[str, Any]]],
        *,
        group: Rendezvous,
        first_rank: int,
    ) -> None:
        """Join the group if the server is not in it, then make the server load bucket after bucket."""
        if self.group_of(client) != group.name:
            await self._leave(client)
            await self._join(client, group, first_rank)
            self._joined = client, group.name

        async with self._session.open(client):
            for bucket, body in requests:
                await self._load(client, bucket, body)
