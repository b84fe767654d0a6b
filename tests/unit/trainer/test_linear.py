"""oneDNN products with hand-written gradients against torch's linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlpipe.trainer import linear as module

pytestmark = pytest.mark.unit


@pytest.fixture(params=[1, float("inf")], ids=["onednn", "torch"])
def kernel(request, monkeypatch):
    """Each kernel at every size, whichever this CPU computes faster."""
    monkeypatch.setattr(module, "_prefers_onednn", torch.backends.mkldnn.is_available)
    monkeypatch.setattr(module, "ONEDNN_FROM", request.param)


@pytest.mark.parametrize("shape", [(70, 1, 24, 40), (3, 5, 40, 24), (1, 1, 8, 8)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_equal_torch(kernel, shape, with_bias):
    torch.manual_seed(0)
    seq, batch, size_in, size_out = shape
    inputs = [torch.randn(seq, batch, size_in), torch.randn(size_out, size_in)]
    inputs += [torch.randn(size_out)] * with_bias
    results = []
    for function in (module.linear, F.linear):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([y, *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_inputs_and_gradients_that_are_not_contiguous_are_read_as_they_are(kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(24, 1, 70).permute(2, 1, 0), torch.randn(24, 40).t()
    grads = []
    for function in (module.linear, F.linear):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        function(*leaves).permute(2, 1, 0).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_no_rows_give_no_rows_and_a_zero_gradient(kernel):
    weight = torch.randn(6, 4, requires_grad=True)
    y = module.linear(torch.zeros(0, 1, 4), weight)
    y.sum().backward()
    assert y.shape == (0, 1, 6) and not weight.grad.any()


def test_a_frozen_weight_gets_no_gradient(kernel):
    x, weight = torch.randn(5, 1, 4, requires_grad=True), torch.randn(6, 4)
    module.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
    assert weight.grad is None
