"""Memory that a server on this host maps, and the layout of a bucket in it.

    worker:  write bucket 1 | write bucket 2        | write bucket 3        | ...
    server:                 | map and load bucket 1 | map and load bucket 2 | ...

The memory has no name (memfd): the server opens it as a file of the worker's process. So nothing is left in
/dev/shm, however the processes end, and the size of /dev/shm, 64 MB in many containers, is not a limit. Both
sides keep the memory from one update to the next, because first writes to new memory take four times as long.
The layout of a bucket is JSON, which `served/rlpipe_shared_weights.py` reads inside the server.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.deltas import Delta

SERVED = Path(__file__).with_name("served")  # a server must have this folder on its module path
LOADER = "rlpipe_shared_weights.load"
PENDING = "hashes are being computed"  # a server's answer to a check until its threads are done
CHECK = "rlpipe-check-"  # prefix of the id with which the same check is requested again
_ALIGNMENT = 64


class HostMemory:
    """Unnamed memory that another process on this host maps. Call `reserve` before the first use.

    bytes: [size] uint8.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("rlpipe-weights")
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Make the memory at least `size` bytes large; its content is lost when it grows."""
        if len(self.bytes) < size:
            os.ftruncate(self._file, size)
            path = f"/proc/self/fd/{self._file}"
            self.bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def location(self) -> dict[str, Any]:
        """Return the data with which `served/rlpipe_shared_weights.py` maps it."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}"}

    def close(self) -> None:
        """Free the memory; mapped pages are freed with the last mapping, in either process."""
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class SharedBuckets:
    """A context manager for two blocks of memory that are used alternately, as large as the largest bucket.

    dtype: dtype in which floating-point weights are written. float32: suffixes of the names of weights that
    are written in float32 instead.
    """

    def __init__(self, dtype: torch.dtype, float32: tuple[str, ...] = ()) -> None:
        self._dtype, self._float32 = dtype, float32
        self._memory = [HostMemory(), HostMemory()]
        self._writing = threading.Lock()

    def __enter__(self) -> SharedBuckets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory."""
        # After a failure of the server, another thread may still be writing a bucket.
        with self._writing:
            for memory in self._memory:
                memory.close()
            self._memory.clear()

    def write(self, bucket: Bucket) -> torch.Tensor:
        """Write a bucket over the second last bucket; return its encoded layout for the server.

        Raises RuntimeError if the memory is already freed.
        """
        with self._writing:
            if not self._memory:
                raise RuntimeError("the buckets are freed.")

            # The server may still read the bucket that was written last, so use the other block.
            self._memory.reverse()
            memory = self._memory[0]
            layout = layout_of(bucket, self._dtype, self._float32)
            memory.reserve(layout["bytes"])
            write_bucket(memory.bytes, bucket, layout)
            return encode_layout(memory.location() | layout)


class ElementMemory:
    """Memory for a delta, reused for later deltas and as large as the largest so far."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._layouts: list[dict[str, dict[str, Any]]] = []

    def write(self, delta: Delta) -> None:
        """Write the elements of all ranks and roles, overwriting the previous delta."""
        elements = [e for rank in delta.ranks for of_role in rank.values() for e in of_role]
        bucket = [(e.name, tensor) for e in elements for tensor in (e.positions, e.values)]
        layout = layout_of(bucket)
        self._memory.reserve(max(1, layout["bytes"]))
        write_bucket(self._memory.bytes, bucket, layout)

        # Each tensor has two entries, and the number of all its elements.
        entries = iter(layout["tensors"])
        self._layouts = [
            {
                role: {
                    "bytes": layout["bytes"],
                    "tensors": [next(entries) for _ in range(2 * len(of_role))],
                    "elements_of": [e.numel for e in of_role],
                }
                for role, of_role in rank.items()
            }
            for rank in delta.ranks
        ]

    def descriptions(self, role: str) -> list[torch.Tensor]:
        """Return, for each rank, the encoded layout of the elements for `role` (target or draft)."""
        return [encode_layout(self._memory.location() | layouts[role]) for layouts in self._layouts]

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


def layout_of(
    bucket: Bucket, dtype: torch.dtype | None = None, float32: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compute the layout of a bucket, tensor after tensor: offsets, dtypes, shapes and the total size.

    bucket: its tensors may be on the meta device. dtype, float32: see `SharedBuckets`; without dtype each
    tensor keeps its own.
    """
    tensors: list[dict[str, Any]] = []
    size = 0
    for name, tensor in bucket:
        written = (dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        written = torch.float32 if name.endswith(float32) else written
        offset = -(-size // _ALIGNMENT) * _ALIGNMENT
        size = offset + tensor.numel() * written.itemsize
        form = {"dtype": str(written).removeprefix("torch."), "shape": list(tensor.shape)}
        tensors.append({"name": name, **form, "offset": offset})
    return {"bytes": size, "tensors": tensors}


def write_bucket(memory: torch.Tensor, bucket: Bucket, layout: Mapping[str, Any]) -> None:
    """Write each tensor of a bucket to its position in `memory`, [bytes] uint8."""
    for entry, (_, tensor) in zip(layout["tensors"], bucket, strict=True):
        dtype = getattr(torch, entry["dtype"])
        end = entry["offset"] + tensor.numel() * dtype.itemsize
        _copy(tensor.detach(), memory[entry["offset"] : end].view(dtype).view(tensor.shape))


def encode_layout(layout: Mapping[str, Any]) -> torch.Tensor:
    """Encode a layout as JSON in [n] uint8, because the server's unpickler accepts only tensors."""
    return torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)


def _copy(tensor: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a tensor to another of the same shape, with one thread if no conversion is needed.

    With several threads, torch's threads would wait for one another, because other cores are busy hashing.
    """
    on_host = tensor.device.type == destination.device.type == "cpu"
    if on_host and tensor.dtype is destination.dtype and tensor.is_contiguous():
        destination.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    else:
        destination.copy_(tensor)
