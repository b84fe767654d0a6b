"""The tokens of a micro-batch on several ranks: what each attends to, and that their parts are the whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batching.layout import empty_micro_batch
from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer.context import ContextLayout, cut_branches
from rlpipe.trainer.layers import BranchLayout
from tests.unit.trainer.test_attention import DIM, attention, forests

pytestmark = [pytest.mark.unit, pytest.mark.property]


@dataclass
class Rank:
    """What the layout asks of a process group."""

    number: int
    ranks: int

    def rank(self):
        return self.number

    def size(self):
        return self.ranks


@dataclass
class Micro:
    """What the layout asks of a micro-batch."""

    branches: list
    tokens: np.ndarray
    positions: np.ndarray


def micro_batch(branches):
    count = sum(branch.length for branch in branches)
    positions = np.concatenate([branch.shared + np.arange(branch.length) for branch in branches])
    return Micro(branches=branches, tokens=np.arange(count) + 100, positions=positions)


def seen(branches):
    """Places of the tokens that each token follows, itself included."""
    starts = np.cumsum([0, *(branch.length for branch in branches)])
    found = []
    for start, branch in zip(starts, branches, strict=False):
        context = [int(starts[j]) + k for j, count in branch.context for k in range(count)]
        found += [[*context, *range(start, start + k + 1)] for k in range(branch.length)]
    return found


@settings(max_examples=200, deadline=None)
@given(branches=forests(), size=st.integers(1, 9))
def test_a_cut_changes_no_token_that_another_follows(branches, size):
    cut = cut_branches(branches, size)
    assert seen(cut) == seen(branches)
    ends = np.cumsum([branch.length for branch in cut])
    starts = ends - [branch.length for branch in cut]
    assert (starts // size == (ends - 1) // size).all()


@settings(max_examples=200, deadline=None)
@given(branches=forests(), ranks=st.integers(2, 4))
def test_every_token_lies_on_one_rank_with_its_position(branches, ranks):
    micro = micro_batch(branches)
    layouts = [ContextLayout(micro, Rank(r, ranks), torch.device("cpu")) for r in range(ranks)]
    assert len({len(layout.indices) for layout in layouts}) == 1
    places = np.concatenate([layout.indices for layout in layouts])
    assert sorted(places.tolist()) == list(range(len(places))) and len(places) >= len(micro.tokens)
    for layout in layouts:
        real = layout.indices < len(micro.tokens)
        assert (layout.tokens[real] == micro.tokens[layout.indices[real]]).all()
        assert (layout.positions.numpy()[real] == micro.positions[layout.indices[real]]).all()


@settings(max_examples=300, deadline=None)
@given(
    branches=forests(),
    ranks=st.integers(2, 4),
    shape=st.sampled_from([(4, 2), (2, 1)]),
    seed=st.integers(0, 2**31),
)
def test_attention_of_all_ranks_is_that_of_one_and_gradients_of_keys_add_up(branches, ranks, shape, seed):
    heads, groups = shape
    micro = micro_batch(branches)
    layouts = [ContextLayout(micro, Rank(r, ranks), torch.device("cpu")) for r in range(ranks)]
    padded = sum(len(layout.indices) for layout in layouts)
    draw = torch.Generator().manual_seed(seed)
    qkv = [
        torch.randn(1, n, padded, DIM, generator=draw).double().requires_grad_()
        for n in (heads, groups, groups)
    ]
    count = len(micro.tokens)
    weights = torch.randn(1, heads, padded, DIM, generator=draw).double()
    weights[:, :, count:] = 0
    layer = attention(heads)
    whole = BranchLayout(branches, torch.zeros(count, dtype=torch.int64))
    expected = whole.attend_masked(*(x[:, :, :count] for x in qkv), attention=layer)
    wanted = torch.autograd.grad((expected * weights[:, :, :count]).sum(), qkv)
    found, total = torch.zeros_like(weights), [torch.zeros_like(x) for x in qkv]
    for layout in layouts:
        query, key, value = qkv
        out = layout.attend_to(query[:, :, layout.indices], key, value, attention=layer)
        found[:, :, layout.indices] = out.detach()
        for sum_, part in zip(
            total, torch.autograd.grad((out * weights[:, :, layout.indices]).sum(), qkv), strict=True
        ):
            sum_ += part
    torch.testing.assert_close(found[:, :, :count], expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(total, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_an_empty_micro_batch_has_a_token_for_every_rank():
    layouts = [ContextLayout(empty_micro_batch(), Rank(r, 4), torch.device("cpu")) for r in range(4)]
    assert [len(layout.tokens) for layout in layouts] == [2] * 4


def test_the_ranks_attend_to_about_the_same_number_of_tokens():
    """One conversation: what the last tokens read would make the last rank the slowest."""
    micro = micro_batch([Branch(length=1024, context=[])])
    pairs = []
    for rank in range(4):
        layout = ContextLayout(micro, Rank(rank, 4), torch.device("cpu"))
        pairs.append(int((layout.indices + 1).sum()))
    assert max(pairs) < 1.01 * min(pairs)
