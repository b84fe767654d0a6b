"""Computes all experts of a layer together: two grouped products instead of one MLP module per expert.

    tokens sorted by expert [N, H] -> y_i = W_e x_i, e the expert of row i -> gate -> second product -> [N, H]

Each expert still has separate weight parameters, so checkpoints, the optimizer and the bridge to Hugging Face
see Megatron's `SequentialMLP`. On a GPU a product is one kernel for all experts (`torch._grouped_mm`), and
the host does not wait for the number of tokens of each expert. For this kernel the weights are stacked into
one tensor, and stacked again in the backward pass, so that no copy is stored in between. On other devices the
products run one after another, without modules. Every expert gets a gradient, which is zero if the expert has
no token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

_grouped_mm: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
_GROUPED_TYPES = (torch.bfloat16, torch.float16)
_ALIGNED = 16  # rows must be a multiple of this many bytes for the GPU kernel


class GroupedExperts(SequentialMLP):
    """This rank's experts: p f_e(x), f_e(x) = W2_e (silu(G_e x) * (U_e x)), with p the router's weight."""

    def forward(
        self, tokens: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Apply the experts to tokens [N, H], sorted by expert; counts: tokens per expert; weights: [N]."""
        experts: Any = self.local_experts
        first = [expert.linear_fc1.weight for expert in experts]
        second = [expert.linear_fc2.weight for expert in experts]

        gate, up = grouped_linear(tokens, counts, first).chunk(2, dim=-1)
        inner = F.silu(gate) * up

        # The router's weights are float32, and are applied before the second product, as Megatron does.
        inner = (inner * weights.unsqueeze(-1)).to(inner.dtype)
        return grouped_linear(inner, counts, second), None


def grouped_linear(x: torch.Tensor, counts: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Multiply each group of consecutive rows by the transpose of its weight, with gradients.

    x: [N, in]. counts: int64, rows of each group, N in total. weights: [out, in] of each group. -> [N, out]

    >>> x = torch.eye(2)
    >>> grouped_linear(x, torch.tensor([1, 0, 1]), [x, x, 3 * x]).tolist()
    [[1.0, 0.0], [0.0, 3.0]]
    """
    return _GroupedLinear.apply(x, counts, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, counts, *weights)
        if _by_kernel(x, weights):
            return _grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=_ends(counts))

        y = x.new_empty(len(x), len(weights[0]))
        for rows, out, weight in zip(*_split(counts, x, y), weights, strict=True):
            torch.mm(rows, weight.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, counts, *weights = ctx.saved_tensors
        dy = dy.contiguous()
        if _by_kernel(x, weights):
            ends = _ends(counts)
            dx = _grouped_mm(dy, torch.stack(weights), offs=ends)
            return dx, None, *_grouped_mm(dy.t(), x, offs=ends).unbind()

        dx = torch.empty_like(x)
        dw = x.new_empty(len(weights), *weights[0].shape)
        groups = zip(*_split(counts, x, dy, dx), weights, dw, strict=True)
        for rows, grad, out, weight, weight_grad in groups:
            torch.mm(grad, weight, out=out)
            torch.mm(grad.t(), rows, out=weight_grad)  # gives zeros if there are no rows
        return dx, None, *dw.unbind()


def _by_kernel(x: torch.Tensor, weights: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> bool:
    """Return whether one kernel can compute all groups, which depends on device, dtype and row sizes."""
    rows = (size * x.element_size() for size in weights[0].shape)
    return x.is_cuda and x.dtype in _GROUPED_TYPES and not any(row % _ALIGNED for row in rows)


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """Return where each group ends, in the kernel's format."""
    return counts.cumsum(0).to(torch.int32)


def _split(counts: torch.Tensor, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Divide the rows of tensors into groups."""
    sizes = counts.tolist()
    return [tensor.split(sizes) for tensor in tensors]
