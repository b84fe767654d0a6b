"""Memory that a server on this host maps, and the layout of a bucket in it.

    worker:  write bucket 1 | write bucket 2        | write bucket 3        | ...
    server:                 | map and load bucket 1 | map and load bucket 2 | ...

The memory has no name (memfd): the server opens it as a file of the worker's process. So nothing is left in
/dev/shm however either process ends, and the size of /dev/shm, 64 MB in many containers, is not a limit. Both
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

SERVED = Path(__file__).with_name("served")  # a server must have it on its path of modules
LOADER = "rlpipe_shared_weights.load"
PENDING = "hashes are being computed"  # a server's answer to a check, until its threads are done
CHECK = "rlpipe-check-"  # begins the id by which the same check is requested again
_ALIGNMENT = 64


class HostMemory:
    """Bytes without a name that another process of this host maps; `reserve` before the first use.

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
        """Return what `served/rlpipe_shared_weights.py` needs to map it."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}"}

    def close(self) -> None:
        """Free it; mapped pages are freed with the last mapping, in either process."""
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class SharedBuckets:
    """Two blocks of memory, used in turn, each as large as the largest bucket so far; a context manager.

    dtype: in which floating-point weights are written. float32: endings of the names of those that are
    written in float32.
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
        # When the server failed, another thread may still be writing a bucket.
        with self._writing:
            for memory in self._memory:
                memory.close()
            self._memory.clear()

    def write(self, bucket: Bucket) -> torch.Tensor:
        """Write a bucket over the second last one; returns its encoded layout, which the server needs.

        Raises RuntimeError once the memory is freed.
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
    """Memory for a delta, kept from one to the next and as large as the largest so far."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._layouts: list[dict[str, dict[str, Any]]] = []

    def write(self, delta: Delta) -> None:
        """Write the elements of all ranks and roles over those of the previous delta."""
        elements = [e for rank in delta.ranks for of_role in rank.values() for e in of_role]
        bucket = [(e.name, tensor) for e in elements for tensor in (e.positions, e.values)]
        layout = layout_of(bucket)
        self._memory.reserve(max(1, layout["bytes"]))
        write_bucket(self._memory.bytes, bucket, layout)

        # Two entries for each tensor, and how many elements it has in all.
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
        """Return for each rank the encoded layout of its writes to its target or its draft."""
        return [encode_layout(self._memory.location() | layouts[role]) for layouts in self._layouts]

    def close(self) -> None:
        """Free it."""
        self._memory.close()


def layout_of(
    bucket: Bucket, dtype: torch.dtype | None = None, float32: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compute the layout of a bucket, tensor after tensor; returns offsets, types, shapes and the total size.

    bucket: its tensors may be on the meta device. dtype, float32: as for `SharedBuckets`; without dtype each
    tensor keeps its type.
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
    """Encode a layout as JSON in [n] uint8: the server's unpickler accepts tensors only."""
    return torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)


def _copy(tensor: torch.Tensor, destination: torch.Tensor) -> None:
    """Write a tensor over another of its shape: by one thread if no conversion is needed.

    Torch's threads wait for one another, and the other cores hash meanwhile.
    """
    on_host = tensor.device.type == destination.device.type == "cpu"
    if on_host and tensor.dtype is destination.dtype and tensor.is_contiguous():
        destination.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    else:
        destination.copy_(tensor)
