"""Vocabulary-parallel logprobs and entropy against torch's log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlpipe.trainer import logprobs as module
from rlpipe.trainer.logprobs import Head, candidate_logprobs, token_logprobs
from tests.helpers.parallel import run_ranks

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
    found = candidate_logprobs(logits, ids, targets=targets, logprobs=logp, temperature=temperature)
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


VOCAB, HIDDEN, ROWS = 24, 5, 11


def head_inputs():
    torch.manual_seed(0)
    states, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (ROWS, VOCAB))
    targets, ids = torch.randint(0, VOCAB, (ROWS,)), torch.randint(0, VOCAB, (ROWS, 4))
    return states, weight, targets, ids, torch.randn(2, ROWS)


def scored(states, weight, targets, weights, logprobs):
    """Logprobs, entropies, and the gradients of states and weight."""
    logp, entropy = logprobs(states, weight, targets)
    return [
        logp,
        entropy,
        *torch.autograd.grad(weights[0] @ logp + weights[1] @ entropy, (states, weight)),
    ]


def by_logits(states, weight, targets):
    return token_logprobs(states @ weight.t(), targets, temperature=0.7)


@pytest.mark.parametrize("rows_at_once", [1, 4, ROWS])
def test_a_head_in_chunks_equals_the_logits_at_once(monkeypatch, rows_at_once):
    monkeypatch.setitem(module.HEAD_BYTES, "cpu", rows_at_once * VOCAB * 4)
    states, weight, targets, ids, weights = head_inputs()
    head = Head(weight=weight, columns=VOCAB, temperature=0.7)

    def logprobs(states, weight, targets):
        return head.logprobs(states, targets)

    found = scored(states, weight, targets, weights, logprobs)
    expected = scored(states, weight, targets, weights, by_logits)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    candidates = head.candidates(states, ids, targets=targets, logprobs=found[0])
    logits = (states @ weight.t()).detach()
    assert not candidates.requires_grad
    torch.testing.assert_close(
        candidates, candidate_logprobs(logits, ids, targets=targets, logprobs=expected[0], temperature=0.7)
    )


def test_a_head_keeps_no_logits_that_are_many(monkeypatch):
    monkeypatch.setitem(module.HEAD_BYTES, "cpu", 4 * VOCAB * 4)
    states, weight, targets, _, _ = head_inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        Head(weight=weight, columns=VOCAB).logprobs(states, targets)
    assert sum(kept) < ROWS * VOCAB


def head_of_a_rank(rank, size, store):
    """What `scored` says of a head whose rows are cut over ranks, and the logprobs of candidates."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    states, weight, targets, ids, weights = head_inputs()
    shard = -(-(VOCAB - 1) // size)  # the last token is padding of the last shard
    mine = weight.detach()[rank * shard : (rank + 1) * shard].requires_grad_()
    start, columns = rank * shard, min(shard, VOCAB - 1 - rank * shard)
    module.HEAD_BYTES["cpu"] = 4 * shard * 4
    group = dist.group.WORLD
    head = Head(weight=mine, columns=columns, temperature=0.7, vocab_start=start, group=group)
    targets, ids = targets.clamp(max=VOCAB - 2), ids.clamp(max=VOCAB - 2)
    logp, entropy = head.logprobs(states, targets)
    gradients = torch.autograd.grad(weights[0] @ logp + weights[1] @ entropy, (states, mine))
    found = [logp, entropy, *gradients, head.candidates(states, ids, targets=targets, logprobs=logp)]
    return [x.detach().numpy() for x in found]


@pytest.mark.integration
def test_a_head_cut_over_ranks_equals_a_whole_one(tmp_path):
    states, weight, targets, ids, weights = head_inputs()
    targets, ids = targets.clamp(max=VOCAB - 2), ids.clamp(max=VOCAB - 2)
    real = weight.detach()[: VOCAB - 1].requires_grad_()
    expected = scored(states, real, targets, weights, by_logits)
    logits = (states @ real.t()).detach()
    candidates = candidate_logprobs(logits, ids, targets=targets, logprobs=expected[0], temperature=0.7)
    ranks = run_ranks(head_of_a_rank, 2, tmp_path / "store")
    for found in ranks:
        for mine, theirs in zip((*found[:3], found[4]), (*expected[:3], candidates), strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs.detach(), rtol=1e-5, atol=1e-6)
    whole = torch.cat([torch.from_numpy(found[3]) for found in ranks])
    assert not whole[VOCAB - 1 :].any()  # padding learns nothing
    torch.testing.assert_close(whole[: VOCAB - 1], expected[3], rtol=1e-5, atol=1e-6)
