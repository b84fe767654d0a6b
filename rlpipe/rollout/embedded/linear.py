"""Matrix products of the engine: the fastest CPU kernel for each size, F.linear on other devices.

In bfloat16 with AVX-512, products use our kernel (`cpu_kernels`), those of many rows with AMX F.linear. Both
read the weight as it is stored.

PyTorch's float32 F.linear uses MKL, which on some CPUs uses only AVX2. There oneDNN with a prepacked weight
is up to 2.2x faster for a few dozen rows or more. It has a fixed cost of about 8 us, so small products stay
with MKL. bfloat16 without these kernels gains from prepacking at every size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlpipe.config.rollout import PACKED_FROM
from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.rollout.embedded.huge_pages import HugePages

_PACK_FOR_ROWS = 32
_PAGES = HugePages()


class Linear:
    """y = x W^T + b, x of shape [N, in]."""

    __slots__ = ("_packed", "_packed_from", "bias", "inputs", "kernels", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Store the weight [out, in] and bias ([out] or None), prepacked where that is faster.

        The attribute `weight` is None if every product uses the prepacked copy, so that only one copy is in
        memory.
        """
        self.weight: torch.Tensor | None = weight.contiguous()
        self.bias = bias
        self.inputs = weight.shape[1]
        self._packed = None
        self._packed_from = float("inf")  # number of rows from which the prepacked weight is used

        # `kernels`: those that compute the products, None for torch's.
        self.kernels = (
            cpu_kernels.usable(weight.device, weight.dtype)
            if cpu_kernels.Kernels.can_multiply(weight)
            else None
        )
        if self.kernels is not None:
            self.weight = _PAGES.copy(weight)
        elif weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            if weight.dtype == torch.float32:
                self._packed_from = PACKED_FROM / max(1, weight.numel())
            elif weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
                self._packed_from = 0

        # Prepacking costs memory, so only weights that can use it are packed.
        if self._packed_from < float("inf"):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_FOR_ROWS)
        if self._packed_from <= 1:
            self.weight = None

    def described(self) -> cpu_kernels.Product | None:
        """Return the product for `Kernels.run_layers`, valid while this lives; None without kernels."""
        if self.kernels is None or self.weight is None:
            return None
        bias = None if self.bias is None else self.bias.data_ptr()
        return cpu_kernels.Product(self.weight.data_ptr(), bias, *self.weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernels = self.kernels
        if kernels is not None and self.weight is not None and len(x) <= kernels.most_rows:
            return kernels.linear(x, self.weight, self.bias)
        if self.weight is None or x.shape[0] >= self._packed_from:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
