"""The Triton kernels compiled for a CUDA device: equal to the torch backend, and lean."""

from __future__ import annotations

import pytest
import torch

from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.loss.linear import linear_mtp_loss
from tests.helpers.mtp_kernel_cases import GROUPS
from tests.helpers.mtp_reference import random_case, reference_loss

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("group", GROUPS)
def test_compiled_kernels_equal_the_torch_backend(group):
    torch.manual_seed(0)
    GROUPS[group]("cuda")


@pytest.mark.parametrize("kind", ["tv", "e2e_tv", "e2e_chain", "kl"])
def test_bfloat16_logits_follow_the_definition(kind):
    case = random_case(151_936, batch=1, length=5, depths=2).to(torch.bfloat16)
    expected = reference_loss(kind, case)
    (autograd,) = torch.autograd.grad(expected, case.draft)
    gpu = case.to("cuda")
    loss, _ = mtp_loss(kind, gpu.draft, gpu.target, mask=gpu.mask, tokens=gpu.tokens)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-5)
    torch.testing.assert_close(gpu.draft.grad.cpu(), autograd, atol=1e-8, rtol=2e-2)


def test_rows_beyond_two_billion_elements_are_addressed():
    rows, vocab = 15_000, 151_936
    logits = torch.zeros(rows, 1, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 0, 5] = 8.0
    mask = torch.zeros(rows, 1, dtype=torch.bool, device="cuda")
    mask[-1] = True
    target = torch.zeros_like(logits[:1]).expand_as(logits)
    logits.requires_grad_()
    loss, _ = mtp_loss("tv", logits, target, mask=mask)
    loss.backward()
    last = logits[-1:].detach().float().cpu().requires_grad_()
    expected, _ = mtp_loss("tv", last, torch.zeros_like(last), mask=torch.ones(1, 1, dtype=torch.bool))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(logits.grad[-1:].float().cpu(), last.grad, atol=1e-7, rtol=1e-2)
    assert (logits.grad[:-1] == 0).all()


def _peak(function) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_extra_memory_is_one_gradient_and_a_bit_per_token():
    logits = torch.randn(512, 1, 151_936, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randn_like(logits.detach())
    mask = torch.ones(512, 1, dtype=torch.bool, device="cuda")
    peak = _peak(lambda: mtp_loss("tv", logits, target, mask=mask)[0].backward())
    assert peak <= 1.07 * logits.numel() * logits.element_size()


def test_the_fused_path_needs_less_than_a_gigabyte_beyond_hidden_states():
    anchors, hidden, vocab = 8192, 2048, 151_936
    draft = torch.randn(anchors, 1, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randn(anchors, hidden, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device="cuda") / hidden**0.5
    mask = torch.ones(anchors, 1, dtype=torch.bool, device="cuda")
    mask[-1] = False
    peak = _peak(
        lambda: linear_mtp_loss("e2e_tv", draft, target, head_weight=weight, mask=mask)[0].backward()
    )
    assert peak - 2 * draft.numel() * 2 < 1e9
