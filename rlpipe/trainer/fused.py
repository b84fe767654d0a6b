"""RMSNorm and SwiGLU with hand-written gradients: fewer passes over memory than autograd's composition.

On a CPU a small model spends a third of its step in elementwise passes, mostly in these two operations. On a
GPU the layers of TransformerEngine, or torch's kernels, are used instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP


class RmsNorm(torch.nn.RMSNorm):
    """y = w * x / sqrt(mean(x^2) + eps), over the last dimension; 1 + w instead of w if centred at 0."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self._centred = getattr(config, "layernorm_zero_centered_gamma", False)

        # With sequence parallelism Megatron sums the weight's gradient over the ranks.
        sequence_parallel = getattr(config, "sequence_parallel", False)
        self.weight.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., H]."""
        # bfloat16 would round 1 + w to a few bits of w: compute in float32.
        if self._centred:
            weight = 1 + self.weight.float() if x.dtype is torch.bfloat16 else 1 + self.weight
            wide = x.to(weight.dtype)
            if x.is_cuda:
                return F.rms_norm(wide, self.normalized_shape, weight, self.eps).to(x.dtype)
            return _RmsNorm.apply(wide, weight, self.eps).to(x.dtype)

        return super().forward(x) if x.is_cuda else _RmsNorm.apply(x, self.weight, self.eps)


class SwiGluMLP(MLP):
    """fc2(silu(gate) * up), without Megatron's options for experts and biases."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """Map [..., H] to [..., H]; also return the bias that the caller must add, which is None."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(_SwiGlu.apply(gate_up))


class _RmsNorm(torch.autograd.Function):
    """With n = x * r, r = 1/rms(x):  dx = r * (w dy - n mean(w dy n)),  dw = sum(dy n)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()

        # The reciprocal of the root mean square, without temporaries.
        r = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        n = (wide * r).to(x.dtype)
        ctx.save_for_backward(n, weight, r)
        return n * weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        n, weight, r = ctx.saved_tensors
        product = (dy * n).reshape(-1, dy.shape[-1])

        # The variable `mean` is -mean(w dy n), so that one fused pass adds n * mean.
        mean = (product @ weight).div_(-dy.shape[-1]).view(r.shape)
        dx = (dy * weight).addcmul_(n, mean).mul_(r.to(dy.dtype))
        return dx, product.sum(0), None


class _SwiGlu(torch.autograd.Function):
    """y = silu(g) u;  dg = dy u silu'(g),  du = dy silu(g); g and u are the halves of the input."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)

        # Both gradients are written into one tensor, in the layout of the input.
        grad = torch.empty_like(ctx.saved_tensors[0])
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate), dy, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=grad_gate)
        return grad
