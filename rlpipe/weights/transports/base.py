"""The interface of a transport, which brings new weights to the server of a rollout worker.

A worker sends weights of its process (`send`). If the trainer broadcasts to all servers at once
(`WeightTransfer.is_broadcast`), the trainer opens the group (`open_root`), and each worker makes its server
receive the weights (`receive`); `send` is then used for a server that could not take part.
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


Staged = Path | Delta | None  # a checkpoint, the delta to the previous version, or nothing


@dataclass(slots=True, kw_only=True)
class WeightUpdate:
    """Weights of one version that a rollout worker sends to its server.

    weights: of target and draft, by their Hugging Face names. flush: whether to drop all cached keys and
    values. staged: the data that `Transport.staged` prepared, if any.
    """

    weights: Mapping[str, torch.Tensor]
    version: int
    flush: bool
    staged: Staged = None


@dataclass(slots=True, kw_only=True)
class Audience:
    """The servers to which a trainer broadcasts, and the content of each broadcast.

    host: address at which the servers reach the trainer. ranks: number of ranks of each server. on_gpu:
    whether the servers are on GPUs. timeout: seconds for joining and sending. device: device of the trainer's
    weights. buckets: buckets of one update, on the meta device.
    """

    host: str
    servers: int
    ranks: int
    on_gpu: bool
    timeout: float
    device: torch.device
    buckets: Sequence[Bucket]


class BroadcastRoot(Protocol):
    """The trainer's side of a broadcast."""

    @property
    def rendezvous(self) -> Rendezvous:
        """The meeting point at which the servers join."""
        ...

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Send buckets to every server, one after the other; see `process_group.Root.send`."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Transport(Protocol):
    """A way to bring weights to a server. A worker makes one transport and uses it for every update.

    sends_deltas: whether `staged` uses the server's current weights.
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
        """Prepare an update while the server is still decoding; yield `WeightUpdate.staged`.

        held: the server's current weights, if known.
        """
        yield None

    def close(self) -> None:
        """Free the memory that the transport keeps between two updates."""

    @classmethod
    def open_root(cls, audience: Audience) -> BroadcastRoot:
        """Open the trainer's side of a broadcast to all servers."""
        raise NotImplementedError(f"{cls.__name__} has no broadcasts")

    async def receive(self, client: Server, offer: Offer, member: str, *, flush: bool) -> BroadcastResult:
        """Make the server, `member` of the group, load the weights that the trainer broadcasts.

        Raises ServerError when server or broadcast fails; then some of the server's weights may be new.
        """
        raise NotImplementedError(f"{type(self).__name__} has no broadcasts")

    def group_of(self, client: Server) -> str:
        """Return the name of the server's group; empty for none."""
        return ""
