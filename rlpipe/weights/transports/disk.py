"""`weight_transfer=disk`: writes weights as a checkpoint in a folder that worker and server share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rlpipe.weights.protocols import Server
from rlpipe.weights.session import WeightSession
from rlpipe.weights.transports.base import Transport, WeightUpdate


class DiskTransport(Transport):
    """Writes a checkpoint before the server is paused, and makes the server read it."""

    def __init__(self, session: WeightSession) -> None:
        self._session = session

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together. Raises ServerError."""
        staged = update.staged
        with contextlib.nullcontext(staged) if staged else self.staged(update.weights, None) as folder:
            body = {
                "model_path": str(folder),
                "weight_version": str(update.version),
                "flush_cache": update.flush,
                "keep_pause": True,
            }
            await client.post("/update_weights_from_disk", body, self._session.timeout)

    @contextlib.contextmanager
    def staged(
        self, weights: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor] | None
    ) -> Iterator[Path]:
        """Write the checkpoint; it is removed when the context exits."""
        with self._session.checkpoint(weights) as folder:
            yield folder
