"""Host memory in huge pages, for what every decode step reads: the weights and the KV cache.

Reading many megabytes in pages of 4 kB misses the table of addresses (TLB), most of all in a virtual machine.
With huge pages a sum over 200 MB took 7 ms instead of 11.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64


class HugePages:
    """Allocates tensors, in huge pages if the kernel has them. The memory is freed with the tensors."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of zeros."""
        size = math.prod(shape) * dtype.itemsize
        if size >= _CHUNK:
            return _map(size).view(dtype).view(shape)

        # Small tensors share a chunk, because each would otherwise take a whole page.
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if padded > len(self._chunk):
                self._chunk = _map(_CHUNK)
            taken, self._chunk = self._chunk[:size], self._chunk[padded:]
        return taken.view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor."""
        return self.zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _map(size: int) -> torch.Tensor:
    """Return size bytes of zeros that begin at a huge page."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % _HUGE_PAGE
    return chunk[start : start + size]
