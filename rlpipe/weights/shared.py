"""Weights through memory that a server on this host maps, in two buckets that are laid and read in turn.

    worker:  lay piece 1 | lay piece 2          | lay piece 3          | ...
    server:              | map and load piece 1 | map and load piece 2 | ...

A bucket is memory without a name (memfd): the server opens it as a file of our process. So nothing is left in
/dev/shm however either process ends, and the size of /dev/shm, 64 MB in many containers, is no limit. Both
sides keep a bucket from one update to the next: first writes to new memory take four times as long as others.
What a bucket holds is said in JSON, which `served/rlpipe_shared_weights.py` reads inside the server.
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

SERVED = Path(__file__).with_name("served")  # what a server must find on its path of modules
LOADER = "rlpipe_shared_weights.load"
_ALIGNMENT = 64


class HostMemory:
    """Bytes without a name that another process of this host maps; `grow` before the first use.

    bytes: [size] uint8.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("rlpipe-weights")
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        """Make it at least so large; what it held is lost."""
        if len(self.bytes) < size:
            os.ftruncate(self._file, size)
            path = f"/proc/self/fd/{self._file}"
            self.bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def where(self) -> dict[str, Any]:
        """What `served/rlpipe_shared_weights.py` finds it by."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}"}

    def close(self) -> None:
        """Free it; what is mapped goes with its last map, in either process."""
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class SharedBuckets:
    """Two buckets, each as large as the largest piece it was given, until they are closed; also a context.

    dtype: in which floating-point weights are laid. float32: endings of the names of those that are laid so.
    """

    def __init__(self, dtype: torch.dtype, float32: tuple[str, ...] = ()) -> None:
        self._dtype, self._float32 = dtype, float32
        self._memory = [HostMemory(), HostMemory()]
        self._laying = threading.Lock()

    def __enter__(self) -> SharedBuckets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buckets."""
        with self._laying:  # in another thread, when the server failed meanwhile
            for memory in self._memory:
                memory.close()
            self._memory.clear()

    def lay(self, piece: Bucket) -> torch.Tensor:
        """Write a piece over the last but one; returns what the server is told of it, JSON in uint8.

        Raises RuntimeError once the buckets are freed.
        """
        with self._laying:
            if not self._memory:
                raise RuntimeError("the buckets are freed.")
            self._memory.reverse()
            memory = self._memory[0]
            said = laid(piece, self._dtype, self._float32)
            memory.grow(said["bytes"])
            fill(memory.bytes, piece, said)
            return encoded(memory.where() | said)


def laid(piece: Bucket, dtype: torch.dtype | None = None, float32: tuple[str, ...] = ()) -> dict[str, Any]:
    """Where each tensor of a piece, which may be on the meta device, lies in a bucket, and how many bytes.

    dtype, float32: as `SharedBuckets` takes them; by default each tensor keeps its type.
    """
    tensors: list[dict[str, Any]] = []
    size = 0
    for name, tensor in piece:
        kind = (dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        kind = torch.float32 if name.endswith(float32) else kind
        offset = -(-size // _ALIGNMENT) * _ALIGNMENT
        size = offset + tensor.numel() * kind.itemsize
        form = {"dtype": str(kind).removeprefix("torch."), "shape": list(tensor.shape)}
        tensors.append({"name": name, **form, "offset": offset})
    return {"bytes": size, "tensors": tensors}


def fill(memory: torch.Tensor, piece: Bucket, said: Mapping[str, Any]) -> None:
    """Write a piece into a bucket's bytes, each tensor where `laid` said."""
    for place, (_, tensor) in zip(said["tensors"], piece, strict=True):
        dtype = getattr(torch, place["dtype"])
        end = place["offset"] + tensor.numel() * dtype.itemsize
        _copy(tensor.detach(), memory[place["offset"] : end].view(dtype).view(tensor.shape))


def encoded(said: Mapping[str, Any]) -> torch.Tensor:
    """What the server is told of a piece: JSON in uint8, as its unpickler takes tensors only."""
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _copy(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Write a tensor over another of its shape: by one thread where the bytes stay as they are.

    Torch's threads wait for one another, and the other cores hash meanwhile.
    """
    on_host = tensor.device.type == place.device.type == "cpu"
    if on_host and tensor.dtype is place.dtype and tensor.is_contiguous():
        place.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    else:
        place.copy_(tensor)
