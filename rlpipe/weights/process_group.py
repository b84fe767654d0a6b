"""Rank 0 of a broadcast in a process group; the other ranks are the servers'.

    once per membership:  Root and its store  <--/init_weights_update_group-->  each rank joins
    for each bucket:      its bytes, broadcast --/update_weights_from_distributed-->  received, loaded

Rank 0 is the trainer's first rank for all servers at once (`Offer`: no weights pass through a rollout
worker), or a rollout worker for the ranks of its server. Owns the group and the description of buckets, but
not sessions, versions or checks.

NCCL calls return before they are done, and hang instead of raising. So each call is made on a separate
thread, and the host waits for it until a deadline. After that the communicator is aborted, the thread is
abandoned, and rank 0 continues.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.offer import Rendezvous

_POLL_SECONDS = 0.0005  # between two checks of a broadcast
_ABORT_SECONDS = 10.0  # limit for leaving a group
_HOST = torch.device("cpu")


class GroupBroken(RuntimeError):
    """A rank did not join, or was lost."""


class Group:
    """Rank 0 of a torch process group that is not the default group. Its calls return at once."""

    def __init__(
        self, host: str, *, ranks: int, timeout: float, backend: str, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Open the store. stream: GPU stream on which an nccl group sends."""
        self._timeout, self._stream = timedelta(seconds=timeout), stream
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]: public, and documented
            host, 0, 1 + ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        name = f"rlpipe-{uuid.uuid4().hex[:8]}"
        self.rendezvous = Rendezvous(
            host=host, port=self._store.port, name=name, size=1 + ranks, backend=backend
        )
        self._group: dist.ProcessGroup | None = None
        self._joining: Future[None] | None = None
        self._left = False

    @property
    def ended(self) -> bool:
        """Whether the group has ended, possibly by a trainer that ends all groups when it stops."""
        return self._left or (self._group is not None and self._group not in c10d._world.pg_map)

    def join(self) -> Future[None]:
        """Start to join; the future is done when all ranks have joined."""
        self._joining = _on_thread(self._join)
        return self._joining

    def broadcast(self, flat: torch.Tensor) -> Future[None]:
        """Start to send; the future waits for the device, and is done when every rank has the bytes."""
        return _on_thread(self._broadcast, flat)

    def leave(self) -> Future[None]:
        """Abort running calls and leave the group. A server leaves on request, or when its process ends."""
        self._left = True

        # A rank that never joins keeps the joining thread for the group's whole timeout.
        if self._joining is not None:
            with contextlib.suppress(InvalidStateError):  # it has joined
                self._joining.set_exception(RuntimeError("it was left"))

        group, self._group = self._group, None
        return _on_thread(_end, group)

    def _join(self) -> None:
        """Join as rank 0 in the way of SGLang's `init_custom_process_group`, which the other ranks use."""
        at = self.rendezvous

        # NCCL's watchdog would end the process, so the deadline of `Root` must be earlier.
        timeout = timedelta(days=1) if at.backend == "nccl" else self._timeout
        group, _ = c10d._new_process_group_helper(
            at.size,
            0,
            [],
            dist.Backend(at.backend),
            dist.PrefixStore(at.name, self._store),  # pyright: ignore[reportPrivateImportUsage]: public
            group_name=at.name,  # pyright: ignore[reportArgumentType]: a NewType of newer torch only
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(at.size)}

        # The group was left while the ranks were joining: end it here, as no other code would.
        if self._left:
            _end(group)
        else:
            self._group = group

    def _broadcast(self, flat: torch.Tensor) -> None:
        with on_stream(self._stream):
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None  # it is None only for ranks outside the group
        while not (self._left or work.is_completed()):
            time.sleep(_POLL_SECONDS)
        if not self._left:
            work.wait()  # raises the error of the broadcast, if it failed


class Root:
    """Rank 0 of a group with `ranks` other ranks, in the process that has the weights. Its calls block.

    host: an address of this machine that the other ranks can reach. timeout: seconds for joining, and for
    sending if `send` has no deadline. gloo broadcasts from host memory. nccl broadcasts from `device`, a GPU
    that no two ranks may share, on a stream that training steps do not use.
    """

    def __init__(
        self, host: str, *, ranks: int, timeout: float, backend: str = "gloo", device: torch.device = _HOST
    ) -> None:
        self._timeout, self._device = timeout, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._group = Group(host, ranks=ranks, timeout=timeout, backend=backend, stream=self._stream)
        self.rendezvous = self._group.rendezvous
        self._joined = self._left = False

    @property
    def left(self) -> bool:
        """Whether the group no longer exists."""
        return self._left or self._group.ended

    def send(self, buckets: Iterable[Bucket], deadline: float | None = None) -> None:
        """Send buckets to every rank, one after the other; first wait until all ranks have joined.

        deadline: time of the monotonic clock at which the ranks must have all buckets. Leaves the group and
        raises GroupBroken when a rank is missing, or the group no longer exists or is closed meanwhile.
        """
        until = time.monotonic() + self._timeout if deadline is None else deadline
        try:
            if self.left:
                raise RuntimeError("it was left")

            if not self._joined:
                self._wait(self._group.join(), until)
                self._joined = True

            for bucket in buckets:
                self._wait(self._group.broadcast(self._flat(bucket)), until)
        except (RuntimeError, dist.DistError, TimeoutError) as error:
            self.close()
            reason = str(error) or "a rank did not answer in time"
            raise GroupBroken(f"the group of {self.rendezvous.size} ranks broke off: {reason}") from error

    def _wait(self, call: Future[None], until: float) -> None:
        call.result(max(0.0, until - time.monotonic()))

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of a bucket, [n] uint8, in the memory that the backend sends from."""
        with on_stream(self._stream):
            moved = [t.detach().to(self._device, non_blocking=True) for _, t in _aligned(bucket)]
            return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in moved])

    def close(self) -> None:
        """Leave the group and abort hanging calls; if the abort hangs too, it is abandoned."""
        if not self._left:
            self._left = True
            with contextlib.suppress(Exception):
                self._group.leave().result(_ABORT_SECONDS)


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Run the context's operations on a GPU stream; None: on the current stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _end(group: dist.ProcessGroup | None) -> None:
    """Abort and destroy a group, unless a trainer in this process has already ended all groups."""
    if group is not None and group in c10d._world.pg_map:
        # Not every backend can abort.
        with contextlib.suppress(RuntimeError):
            group.abort()
        dist.destroy_process_group(group)


def _on_thread(function: Callable[..., None], *args: Any) -> Future[None]:
    """Call a function on a thread that may be abandoned."""
    future: Future[None] = Future()

    def run() -> None:
        # Who waits may have been told that the group was left.
        with contextlib.suppress(InvalidStateError):
            try:
                function(*args)
            except BaseException as error:
                # Drop the traceback, whose frames would keep the group in memory.
                future.set_exception(error.with_traceback(None))
            else:
                future.set_result(None)

    threading.Thread(target=run, name="rlpipe-broadcast", daemon=True).start()
    return future


def describe_join(group: Rendezvous, first_rank: int) -> dict[str, Any]:
    """Return the body of `/init_weights_update_group` for a server with first_rank and the ranks after it."""
    return {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": first_rank,
        "world_size": group.size,
        "group_name": group.name,
        "backend": group.backend,
    }


def describe_bucket(bucket: Bucket, group: str) -> dict[str, Any]:
    """Describe, for a server, a bucket that `Root.send` broadcasts.

    bucket: its tensors may be on the meta device.
    """
    bucket = _aligned(bucket)
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


def _aligned(bucket: Bucket) -> Bucket:
    """Order a bucket by item size, largest first, as SGLang needs each tensor aligned to its dtype."""
    return sorted(bucket, key=lambda pair: -pair[1].itemsize)
