"""Hand-written gradients against autograd's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlpipe.trainer.fused import RmsNorm, _SwiGlu

pytestmark = pytest.mark.unit


def both(function, reference, *inputs):
    """Outputs and input gradients of two functions at the same point and output gradient."""
    results = []
    for f in (function, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = f(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        results.append([out, *(leaf.grad for leaf in leaves)])
    return results


@pytest.mark.parametrize("centre", [0, 1], ids=["1 + weight", "weight"])
@pytest.mark.parametrize("shape", [(5, 3, 16), (4, 2, 2, 8)])
def test_rms_norm_equals_torch(shape, centre):
    torch.manual_seed(0)
    norm = RmsNorm(SimpleNamespace(layernorm_zero_centered_gamma=centre == 0), shape[-1], eps=1e-6)

    def ours(x, w):
        norm.weight = None
        norm._parameters["weight"] = w
        return norm(x)

    found, expected = both(
        ours,
        lambda x, w: F.rms_norm(x, (shape[-1],), w + 1 - centre, 1e-6),
        torch.randn(shape),
        torch.rand(shape[-1]) + centre - 0.5,
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rms_norm_takes_inputs_that_are_not_contiguous():
    torch.manual_seed(0)
    norm = RmsNorm(None, 8, eps=1e-6)
    x = torch.randn(3, 2, 16)[..., :8].requires_grad_()
    norm(x).transpose(0, 1).sum().backward()
    assert x.grad.shape == x.shape and x.grad.isfinite().all()


def test_swiglu_equals_its_composition():
    torch.manual_seed(0)

    def reference(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    found, expected = both(_SwiGlu.apply, reference, torch.randn(5, 3, 32))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
