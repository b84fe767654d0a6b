"""GPU memory that another process on the same GPU maps, by CUDA IPC through the driver's library.

It does not use torch's handles: these require the same version of torch, and a server has a different one.
The server's side is in `served/rlpipe_shared_weights.py`.

In CUDA it is undefined behaviour to free memory that another process still maps. A server unmaps memory when
it maps other memory, or at its end, but a hanging server never does. So this side never frees memory. A
process allocates once, for the largest bucket of the run (`memory_of`), and again only if a bucket grows. The
driver may give new memory an old handle, so each allocation has a `generation`, which servers compare.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Any

import torch


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class DeviceMemory:
    """Like `HostMemory`, but on a GPU and never freed. Calls raise RuntimeError with the driver's error."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, ctypes.CDLL("libcuda.so.1")
        self._pointer, self._handle, self._generation = ctypes.c_uint64(0), Handle(), ""
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, size: int) -> None:
        """Make the memory at least `size` bytes large; its content is lost when it grows."""
        if len(self.bytes) < size:
            # Memory that other processes map cannot grow, so keep it and allocate new memory.
            self._generation = uuid.uuid4().hex
            self._call("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(size))
            self._call("cuIpcGetMemHandle", ctypes.byref(self._handle), self._pointer)
            self.bytes = as_tensor(self._pointer.value, size, self._device)

    def location(self) -> dict[str, Any]:
        """Return the data with which `served/rlpipe_shared_weights.py` maps it; does not wait for writes."""
        return {
            "handle": bytes(self._handle.bytes).hex(),
            "generation": self._generation,
            "gpu": str(torch.cuda.get_device_properties(self._device).uuid),
            "size": len(self.bytes),
        }

    def _call(self, function: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            # This also sets the context in which torch works for this thread.
            torch.cuda.synchronize()
            if code := getattr(self._driver, function)(*arguments):
                raise RuntimeError(f"{function} on {self._device}: CUDA driver error {code}")


@functools.cache
def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory that this process shares on a GPU; each call returns the same object."""
    return DeviceMemory(device)


def as_tensor(pointer: int, size: int, device: torch.device) -> torch.Tensor:
    """Wrap memory that torch did not allocate as [size] uint8."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)
