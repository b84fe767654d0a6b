"""Attention over branches against attention over whole trajectories, values and gradients."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer.layers import BranchLayout, CausalAttention

pytestmark = pytest.mark.unit

# 7 tokens; 4 more that follow the first 5 of them; 3 that follow those 5 and 2 of the 4; another family
BRANCHES = [
    Branch(length=7, context=[]),
    Branch(length=4, context=[(0, 5)]),
    Branch(length=3, context=[(0, 5), (1, 2)]),
    Branch(length=6, context=[]),
]
PATHS = [[*range(7)], [*range(5), *range(7, 11)], [*range(5), 7, 8, *range(11, 14)], [*range(14, 20)]]
HEADS, DIM = 4, 8


def attention():
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, kv_channels=DIM
    )
    return CausalAttention(config)


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_a_branch_sees_its_context_and_its_own_past_and_nothing_else(groups):
    torch.manual_seed(0)
    inputs = [torch.randn(20, 1, n, DIM) for n in (HEADS, groups, groups)]
    weights = torch.randn(20, 1, HEADS * DIM)
    layout = BranchLayout(BRANCHES, torch.zeros(20, dtype=torch.int64))

    shared = [x.clone().requires_grad_() for x in inputs]
    out = attention()(*shared, None, packed_seq_params=layout)
    (out * weights).sum().backward()

    whole = [x.clone().requires_grad_() for x in inputs]
    expected, done = torch.zeros_like(out), 0
    for branch, path in zip(BRANCHES, PATHS, strict=True):
        own = path[-branch.length :]
        rows = attention()(*(x[path] for x in whole), None)[-branch.length :]
        expected = expected.index_copy(0, torch.tensor(own), rows)
        done += branch.length
    (expected * weights).sum().backward()

    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(shared, whole, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_without_a_layout_rows_are_causal():
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, HEADS, DIM) for _ in range(3))
    before = attention()(q, k, v, None)
    k[6:], v[6:] = 0, 0
    after = attention()(q, k, v, None)
    torch.testing.assert_close(before[:6], after[:6])
    assert (before[6:] - after[6:]).abs().max() > 0.1


def test_attention_never_takes_cudnns_kernel():
    torch.backends.cuda.enable_cudnn_sdp(True)
    attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
