"""`weight_transfer=shared`: through memory that the worker writes and its server maps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import torch

from rlpipe.models import family_of
from rlpipe.weights.protocols import Server
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared_memory import SharedBuckets
from rlpipe.weights.transports.base import Transport, WeightUpdate


class SharedMemoryTransport(Transport):
    """Writes a bucket into shared memory while the server loads the one before."""

    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._memory: SharedBuckets | None = None

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together. Raises ServerError."""
        session = self._session
        sent = session.buckets(update.weights)
        requests = list(session.requests(sent, version=update.version, flush=update.flush))

        dtype = getattr(torch, session.config.dtype)
        memory = self._memory or SharedBuckets(dtype, family_of(session.hf_config).float32)
        self._memory = memory

        try:
            async with session.open(client):
                # Two blocks of memory: write one while the server reads the other.
                loading: Awaitable[None] = asyncio.sleep(0)
                for bucket, body in requests:
                    description, _ = await asyncio.gather(asyncio.to_thread(memory.write, bucket), loading)
                    loading = session.load_mapped(client, description, body)
                await loading
        except BaseException:
            # The server may still read this memory, so the next update must not write over it.
            self.close()
            raise

    def close(self) -> None:
        """Free the memory shared with the server."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
