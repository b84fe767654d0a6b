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
from pathlib import Path
from typing import Any

import torch

from rlpipe.weights.buckets import Bucket

SERVED = Path(__file__).with_name("served")  # what a server must find on its path of modules
LOADER = "rlpipe_shared_weights.load"
_ALIGNMENT = 64


class SharedBuckets:
    """Two buckets, each as large as the largest piece it was given, until they are closed; also a context.

    dtype: in which floating-point weights are laid. float32: endings of the names of those that are laid so.
    """

    def __init__(self, dtype: torch.dtype, float32: tuple[str, ...] = ()) -> None:
        self._dtype, self._float32 = dtype, float32
        self._files = [os.memfd_create("rlpipe-weights") for _ in range(2)]
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in self._files]
        self._laying = threading.Lock()

    def __enter__(self) -> SharedBuckets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buckets."""
        with self._laying:  # in another thread, when the server failed meanwhile
            for file in self._files:
                os.close(file)
            self._files.clear()
            self._memory.clear()  # what is mapped goes with its last map, in either process

    def lay(self, piece: Bucket) -> torch.Tensor:
        """Write a piece over the last but one; returns what the server is told of it, JSON in uint8.

        Raises RuntimeError once the buckets are freed.
        """
        with self._laying:
            if not self._files:
                raise RuntimeError("the buckets are freed.")
            return self._lay(piece)

    def _lay(self, piece: Bucket) -> torch.Tensor:
        tensors: list[dict[str, Any]] = []
        size = 0
        for name, tensor in piece:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            dtype = torch.float32 if name.endswith(self._float32) else dtype
            offset = -(-size // _ALIGNMENT) * _ALIGNMENT
            size = offset + tensor.numel() * dtype.itemsize
            kind = str(dtype).removeprefix("torch.")
            tensors.append({"name": name, "dtype": kind, "shape": list(tensor.shape), "offset": offset})
        self._files.reverse()
        self._memory.reverse()
        file, memory = self._files[0], self._memory[0]
        if len(memory) < size:
            os.ftruncate(file, size)
            memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
            self._memory[0] = memory
        for laid, (_, tensor) in zip(tensors, piece, strict=True):
            dtype = getattr(torch, laid["dtype"])
            end = laid["offset"] + tensor.numel() * dtype.itemsize
            _copy(tensor.detach(), memory[laid["offset"] : end].view(dtype).view(tensor.shape))
        said = {"path": f"/proc/{os.getpid()}/fd/{file}", "bytes": size, "tensors": tensors}
        return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _copy(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Write a tensor over another of its shape: by one thread where the bytes stay as they are.

    Torch's threads wait for one another, and the other cores hash meanwhile.
    """
    if tensor.device.type == "cpu" and tensor.dtype is place.dtype and tensor.is_contiguous():
        place.view(-1).view(torch.uint8).numpy()[:] = tensor.view(-1).view(torch.uint8).numpy()
    else:
        place.copy_(tensor)
