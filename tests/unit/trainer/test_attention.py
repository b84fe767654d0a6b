"""Flash attention over branches against one masked call for each, on random trees of shared prefixes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig

from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer.attention import BranchPlan
from rlpipe.trainer.layers import BranchLayout, CausalAttention
from tests.helpers.branches import DIM, forests, groups_of_answers

pytestmark = [pytest.mark.unit, pytest.mark.property]


def attention(heads):
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * DIM, num_attention_heads=heads, kv_channels=DIM
    )
    return CausalAttention(config)


def both(branches, heads, groups, seed, dtype):
    """Values and gradients (of q, k, v) by flash attention in parts and by masks."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(branch.length for branch in branches)
    inputs = [torch.randn(1, n, tokens, DIM, generator=draw) for n in (heads, groups, groups)]
    weights = torch.randn(1, heads, tokens, DIM, generator=draw).to(dtype)
    layout = BranchLayout(branches, torch.zeros(tokens, dtype=torch.int64))
    found = []
    for attend in (layout.attend, layout.attend_masked):
        qkv = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*qkv, attention=attention(heads))
        found.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    return found


@settings(max_examples=400, deadline=None)
@given(branches=forests(), shape=st.sampled_from([(4, 4), (4, 2), (2, 1)]), seed=st.integers(0, 2**31))
def test_parts_joined_by_their_normalisers_are_attention_to_the_whole(branches, shape, seed):
    for mine, masked in zip(*both(branches, *shape, seed, torch.float64), strict=True):
        torch.testing.assert_close(mine, masked, rtol=0, atol=1e-12)


def test_answers_of_many_lengths_share_a_few_calls_and_keep_their_values():
    branches = groups_of_answers()
    plan = BranchPlan(branches, None, torch.device("cpu"))
    assert len(plan.siblings) == 4  # two contexts of each prompt
    assert len(plan.buckets) <= len(branches) // 2
    for mine, masked in zip(*both(branches, 4, 2, 0, torch.float64), strict=True):
        torch.testing.assert_close(mine, masked, rtol=0, atol=1e-12)


def test_a_gradient_of_padding_that_is_kept_is_noticed(monkeypatch):
    """Padding repeats a branch's last token: with its gradient that token would count several times."""
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda x, *_: x)
    _, _, key, _ = zip(*both(groups_of_answers(), 4, 2, 0, torch.float64), strict=True)
    assert (key[0] - key[1]).abs().max() > 0.1


def test_one_branch_is_attended_to_without_copies():
    plan = BranchPlan([Branch(length=9, context=[])], None, torch.device("cpu"))
    assert plan.key_index is plan.padded_index is plan.order is plan.padding is None


def test_in_half_precision_they_are_as_close_as_half_precision_is():
    branches = [Branch(length=7, context=[]), *(Branch(length=5, context=[(0, 6)]) for _ in range(20))]
    for mine, masked in zip(*both(branches, 4, 2, 0, torch.bfloat16), strict=True):
        torch.testing.assert_close(mine, masked, rtol=3e-2, atol=3e-2)


def test_a_normaliser_that_is_ignored_is_noticed(monkeypatch):
    """The gradient needs the whole's normaliser: with that of the part alone it is another function's."""
    monkeypatch.setattr(torch, "logaddexp", lambda own, before: own)
    branches = [Branch(length=3, context=[]), Branch(length=2, context=[(0, 2)])]
    mine, masked = both(branches, 4, 2, 0, torch.float64)
    assert (mine[0] - masked[0]).abs().max() > 0.1
