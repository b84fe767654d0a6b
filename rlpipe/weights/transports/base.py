"""The interface of a transport: one way for new weights to reach the server of a rollout worker.

A worker sends weights of its process (`send`). Where the trainer broadcasts to all servers at once
(`WeightTransfer.is_broadcast`), the trainer opens the group (`open_root`) and each worker has its server
receive the weights (`receive`); `send` is then the way for a server that could not take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.deltas import Delta
from rlpipe.weights.offer import BroadcastResult, Offer, Rendezvous
from rlpipe.weights.protocols import Server

if TYPE_CHECKING:
    from rlpipe.weights.session import WeightSession


Staged = Path | Delta | None  # a checkpoint, the difference to the version before, or nothing


@dataclass(slots=True, kw_only=True)
class WeightUpdate:
    """Weights of one version on their way from a rollout worker to its server.

    weights: of target and draft, by their Hugging Face names. flush: drop all cached keys and values.
    staged: what `Transport.staged` prepared, if it did.
    """

    weights: Mapping[str, torch.Tensor]
    version: int
    flush: bool
    staged: Staged = None


@dataclass(slots=True, kw_only=True)
class Audience:
    """The servers to which a trainer broadcasts, and the content of each broadcast.

    host: how the servers reach the trainer. ranks: of each server. on_gpu: whether the servers are on GPUs.
    timeout: seconds for joining and sending. device: where the trainer's weights are.
    buckets: of one update, on the meta device.
    """

    host: str
    servers: int
    ranks: int
    on_gpu: bool
    timeout: float
    device: torch.device
    buckets: Sequence[Bucket]


class BroadcastRoot(Protocol):
    """The trainer's end of a broadcast."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the servers join."""
        ...

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Send buckets to every server, one after the other; see `process_group.Root.send`."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Transport(Protocol):
    """One way of bringing weights to a server; a worker makes one and uses it for every update.

    sends_deltas: whether `staged` uses the server's present weights.
    """

    sends_deltas: bool = False

    def __init__(self, session: WeightSession) -> None: ...

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together. Raises ServerError."""
        ...

    @contextlib.contextmanager
    def staged(
        self, weights: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor] | None
    ) -> Iterator[Staged]:
        """Prepare an update while the server still runs; yields `WeightUpdate.staged`.

        held: the server's present weights, if known.
        """
        yield None

    def close(self) -> None:
        """Free the memory that the transport keeps between two updates."""

    @classmethod
    def open_root(cls, audience: Audience) -> BroadcastRoot:
        """Open the trainer's end of a broadcast to all servers."""
        raise NotImplementedError(f"{cls.__name__} has no broadcasts")

    async def receive(self, client: Server, offer: Offer, member: str, *, flush: bool) -> BroadcastResult:
        """Load on the server, `member` of the group, the weights that the trainer broadcasts.

        Raises ServerError when either breaks off: some of its weights may be new then.
        """
        raise NotImplementedError(f"{type(self).__name__} has no broadcasts")

    def group_of(self, client: Server) -> str:
        """Return the name of the server's group; empty for none."""
        return ""
