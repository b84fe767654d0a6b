"""Megatron's linear layers on a CPU, with float32 products computed by oneDNN where that is faster.

PyTorch computes float32 products with MKL, which uses only AVX2 on some CPUs. Where a CPU has AVX-512, oneDNN
uses it and is 1.6 to 2.4x faster for products of at least a million multiply-adds, without copying transposed
views. With AVX2 alone, MKL is up to twice as fast. Other dtypes and small products are left to torch.
Owns no weights: the layers, their shards and collectives are Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

ONEDNN_FROM = 1_000_000  # multiply-adds


def use_onednn(block: torch.nn.Module) -> None:
    """Make the parallel linear layers of a block on the CPU use this module.

    oneDNN prepares a kernel (2 ms) for every new number of rows and caches about a thousand. This is faster
    for layers that read micro-batches padded to a multiple, and slower where the number of rows seldom
    repeats, as with experts.
    """
    for module in block.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.is_expert:
            module._forward_impl = _forward_impl  # pyright: ignore[reportAttributeAccessIssue]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute y = x W^T + b with gradients; x [..., in], weight [out, in], bias [out] or None."""
    return _Linear.apply(x, weight, bias)


def _forward_impl(
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: object,
) -> torch.Tensor:
    """Replace Megatron's `linear_with_grad_accumulation_and_async_allreduce`, without its fusions."""
    # Both collectives below are differentiable; Megatron fuses them into the product's gradient.
    if allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    return linear(input, weight, bias)


class _Linear(torch.autograd.Function):
    """dx = dy W,  dW = dy^T x,  db = sum(dy)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, dy.flatten(0, -2)
        dx = _product(dy, weight.t()).view_as(x) if ctx.needs_input_grad[0] else None
        dw = _transposed_product(dy, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a b^T + bias: a [n, k], b [m, k], bias [m] or None -> [n, m]."""
    if a.dtype is torch.float32 and a.numel() * b.shape[0] >= ONEDNN_FROM and _prefers_onednn():
        return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return torch.nn.functional.linear(a, b, bias)


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a^T b: a [k, n], b [k, m] -> [n, m]. `a` is copied, so pass the smaller operand first."""
    return _product(a.t(), b.t()) if a.shape[1] <= b.shape[1] else _product(b.t(), a.t()).t()


def _prefers_onednn() -> bool:
    """Return whether this build of torch has oneDNN, and this CPU is not one on which MKL is faster."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX2"
