"""Protocols of the trainers, engines and servers that exchange weights.

Imports none of their implementations: `rollout` and `trainer` are layers above `weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rlpipe.weights.buckets import Bucket
    from rlpipe.weights.offer import Member, Offer


class ReceivesWeights(Protocol):
    """An engine whose weights can be replaced."""

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and draft weights (HF names -> tensors) between two decode steps.

        Tokens sampled after this call carry `version`.
        """
        ...


@runtime_checkable
class ReceivesBroadcasts(ReceivesWeights, Protocol):
    """An engine whose server can also join the group to which the trainer broadcasts."""

    def membership(self) -> Member:
        """Return the server and its group, if the server answers now."""
        ...

    def receive_weights(self, offer: Offer) -> None:
        """Replace weights like `update_weights`, but from the trainer's broadcast to all servers."""
        ...


class ExportsWeights(Protocol):
    """A trainer rank that exports its weights bucket by bucket."""

    hf_config: Mapping[str, Any]
    device: torch.device

    def weight_buckets(
        self, megabytes: int, dtype: torch.dtype, *, everywhere: bool = False
    ) -> Iterable[Bucket]:
        """Yield full tensors on rank 0, or on every rank; collective: every rank must iterate to the end."""
        ...

    def bucket_plan(self, megabytes: int, dtype: torch.dtype) -> list[Bucket]:
        """Return the buckets that `weight_buckets` will yield, as tensors on the meta device."""
        ...


class ExportsDraft(Protocol):
    """The trainer of a draft that is not part of the trained model."""

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights of the draft under the names with which they are sent with the target's."""
        ...


class ServerError(RuntimeError):
    """The server answered with an error or with unexpected content."""


class ServerUnreachable(ServerError):
    """The server did not answer: it died, hangs, or was stopped."""


class Server(Protocol):
    """HTTP client of one server, with JSON bodies and answers."""

    async def read(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request that changes nothing; it is repeated while the server is unreachable."""
        ...

    async def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """Send once. timeout: seconds. Raises ServerError, ServerUnreachable."""
        ...
