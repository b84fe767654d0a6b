"""Vocabulary-parallel logprobs and entropy against torch's log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from rlpipe.trainer import logprobs as module
from rlpipe.trainer.logprobs import candidate_logprobs, token_logprobs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1 << 20, 20])
def test_values_and_gradients_equal_log_softmax(monkeypatch, temperature, chunk):
    monkeypatch.setattr(module, "CACHE_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (5 * torch.randn(7, 9)).double().float().requires_grad_()
    targets = torch.randint(0, 9, (7,))
    weights = torch.randn(2, 7)

    logp, entropy = token_logprobs(logits, targets, temperature=temperature)
    (weights[0] @ logp + weights[1] @ entropy).backward()
    found, logits.grad = logits.grad, None
    everything = (logits / temperature).log_softmax(-1)
    expected = everything.gather(1, targets[:, None]).squeeze(1)
    expected_entropy = -(everything.exp() * everything).sum(-1)
    (weights[0] @ expected + weights[1] @ expected_entropy).backward()

    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(found, logits.grad)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_candidates_are_scored_as_log_softmax_scores_them(temperature):
    torch.manual_seed(0)
    logits = (5 * torch.randn(7, 9)).requires_grad_()
    targets, ids = torch.randint(0, 9, (7,)), torch.randint(0, 9, (7, 4))
    ids[2, 1:] = -1  # padding
    logp, _ = token_logprobs(logits, targets, temperature=temperature)
    found = candidate_logprobs(logits, ids, targets, logp, temperature=temperature)
    expected = (
        (logits / temperature).log_softmax(-1).gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    )
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


def test_no_positions_give_empty_results_and_an_empty_gradient():
    logits = torch.zeros(0, 9, requires_grad=True)
    logp, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.int64))
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,) and logits.grad.shape == (0, 9)


def test_huge_logits_do_not_overflow():
    logp, entropy = token_logprobs(torch.tensor([[1e4, 0.0, -1e4]]), torch.tensor([0]))
    assert logp.item() == 0 and entropy.item() == 0


def test_bfloat16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(3, 5000).bfloat16()
    logp, _ = token_logprobs(logits, torch.tensor([1, 2, 3]))
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor([[1], [2], [3]])).squeeze(1)
    assert logp.dtype is torch.float32
    torch.testing.assert_close(logp, expected)
