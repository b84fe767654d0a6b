"""A transport for simulated servers, which map no memory: tensors by value, in the bodies of requests."""

from __future__ import annotations

import asyncio

from rlpipe.weights.buckets import serialize
from rlpipe.weights.protocols import Server
from rlpipe.weights.transports.base import WeightUpdate
from rlpipe.weights.transports.broadcast import BroadcastTransport


class TensorTransport(BroadcastTransport):
    """Receives broadcasts as its base does; what a worker sends itself travels in request bodies."""

    async def send(self, client: Server, update: WeightUpdate) -> None:
        session = self._session
        sent = session.buckets(update.weights)
        async with session.open(client):
            for bucket, body in session.requests(sent, version=update.version, flush=update.flush):
                body["serialized_named_tensors"] = [await asyncio.to_thread(serialize, bucket)]
                await client.post("/update_weights_from_tensor", body, session.timeout)
