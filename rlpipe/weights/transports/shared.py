"""`weight_transfer=shared`: the worker writes weights to memory that its server maps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping

import torch

from rlpipe.models import family_of
from rlpipe.weights.deltas import Delta
from rlpipe.weights.protocols import Server
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared_memory import ElementMemory, SharedBuckets
from rlpipe.weights.transports.base import Transport, WeightUpdate


class SharedMemoryTransport(Transport):
    """Writes buckets while the server loads the previous one, or a delta before the server is paused."""

    sends_deltas = True

    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._memory: SharedBuckets | None = None
        self._elements: ElementMemory | None = None

    @contextlib.contextmanager
    def staged(
        self, weights: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor] | None
    ) -> Iterator[Delta | None]:
        """Compute and write the delta to the server's weights."""
        delta = None if held is None else self._session.delta(held, weights)
        if delta is not None:
            self._elements = self._elements or ElementMemory()
            self._elements.write(delta)
        yield delta

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together. Raises ServerError."""
        try:
            if isinstance(update.staged, Delta):
                await self._send_delta(client, update)
            else:
                await self._send_all(client, update)
        except BaseException:
            # The server may still read this memory, so the next update must use other memory.
            self.close()
            raise

    async def _send_delta(self, client: Server, update: WeightUpdate) -> None:
        """Make the server write the staged elements, first of its target, then of its draft."""
        assert self._elements is not None
        async with self._session.open(client):
            for role in ("target", "draft"):
                last = role == "draft"
                body = {
                    "selector": role,
                    "flush_cache": update.flush and last,
                    "weight_version": str(update.version) if last else None,
                }
                await self._session.load_mapped(client, self._elements.descriptions(role), body)

    async def _send_all(self, client: Server, update: WeightUpdate) -> None:
        """Make the server load full weights, bucket by bucket."""
        session = self._session
        sent = session.buckets(update.weights)
        requests = list(session.requests(sent, version=update.version, flush=update.flush))

        dtype = getattr(torch, session.config.dtype)
        memory = self._memory or SharedBuckets(dtype, family_of(session.hf_config).float32)
        self._memory = memory

        async with session.open(client):
            # Two blocks of memory: write one while the server reads the other.
            loading: Awaitable[None] = asyncio.sleep(0)
            for bucket, body in requests:
                description, _ = await asyncio.gather(asyncio.to_thread(memory.write, bucket), loading)
                loading = session.load_mapped(client, [description], body)
            await loading

    def close(self) -> None:
        """Free the memory shared with the server."""
        for memory in (self._memory, self._elements):
            if memory is not None:
                memory.close()
        self._memory = self._elements = None
