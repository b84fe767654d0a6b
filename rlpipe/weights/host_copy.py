"""The trainer's copy of the last version that was sent, in host memory that all versions reuse.

Servers are paused while a version is copied, and the first writes to new memory are several times slower than
later ones. So the memory is allocated, and written to once, before the first update. For a trainer on a GPU
it is page-locked; then a copy runs at the speed of the bus, in parallel with the GPU's other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.shared_memory import layout_of


class HostCopy:
    """One buffer with a view for each tensor of `plan`, a list of buckets on the meta device.

    tensors: the views, by name. Raises RuntimeError when a device's driver cannot lock the memory.
    """

    def __init__(self, plan: Sequence[Bucket], device: torch.device) -> None:
        self._form = layout_of([pair for bucket in plan for pair in bucket])
        self._locked = device.type == "cuda"
        self._bytes = torch.zeros(self._form["bytes"], dtype=torch.uint8)  # writes to every page
        if self._locked and len(self._bytes):
            # Do not use torch's pinned allocator, which rounds up to a power of two.
            runtime: Any = torch.cuda.cudart()
            if code := int(runtime.cudaHostRegister(self._bytes.data_ptr(), len(self._bytes), 0)):
                raise RuntimeError(f"cudaHostRegister of {len(self._bytes)} bytes: CUDA error {code}")

        self.tensors: dict[str, torch.Tensor] = {}
        for entry in self._form["tensors"]:
            dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
            end = entry["offset"] + shape.numel() * dtype.itemsize
            self.tensors[entry["name"]] = self._bytes[entry["offset"] : end].view(dtype).view(shape)

    def fits(self, plan: Sequence[Bucket]) -> bool:
        """Return whether the memory was made for the tensors of `plan`, in this order."""
        return layout_of([pair for bucket in plan for pair in bucket]) == self._form

    def write(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket; copies from a GPU are asynchronous (see `read`)."""
        for name, tensor in bucket:
            self.tensors[name].copy_(tensor, non_blocking=self._locked)

    def read(self) -> dict[str, torch.Tensor]:
        """Wait until everything is written, and return the tensors."""
        if self._locked:
            torch.cuda.synchronize()
        return self.tensors

    def close(self) -> None:
        """Unlock the memory; it is freed together with its last view."""
        if self._locked and len(self._bytes):
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.data_ptr())
            self._locked = False
