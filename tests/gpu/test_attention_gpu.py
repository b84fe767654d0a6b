"""Attention over shared prefixes by the GPU's flash kernel, against masks in float32 on the CPU."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from rlpipe.batching.micro_batch import Branch
from rlpipe.rollout.embedded.attention import attend
from rlpipe.trainer.layers import BranchLayout, CausalAttention

pytestmark = pytest.mark.gpu

BRANCHES = [
    Branch(length=300, context=[]),
    Branch(length=70, context=[(0, 257)]),
    Branch(length=65, context=[(0, 257), (1, 33)]),
    Branch(length=129, context=[]),
]
HEADS, DIM = 8, 64


@pytest.mark.parametrize("groups", [8, 2, 1])
def test_values_and_gradients_are_those_of_masks(groups):
    torch.manual_seed(0)
    tokens = sum(branch.length for branch in BRANCHES)
    inputs = [torch.randn(1, n, tokens, DIM).bfloat16() for n in (HEADS, groups, groups)]
    weights = torch.randn(1, HEADS, tokens, DIM).bfloat16()
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, kv_channels=DIM
    )
    layer, found = CausalAttention(config), []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        layout = BranchLayout(BRANCHES, torch.zeros(tokens, dtype=torch.int64, device=device))
        attend = layout.attend if device == "cuda" else layout.attend_masked
        qkv = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attend(*qkv, attention=layer)
        gradients = torch.autograd.grad((out * weights.to(device, dtype)).sum(), qkv)
        found.append([x.float().cpu() for x in (out, *gradients)])
    for mine, masked in zip(*found, strict=True):
        error = (mine - masked).norm() / masked.norm()
        assert error < 1e-2, error


@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
def test_cached_keys_are_attended_to_without_the_products_of_all_scores(heads):
    """Of the embedded engine, with a mask: torch by itself stores the scores, by three kernels."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, heads[0], DIM, generator=draw)
    keys, values = (torch.randn(3, heads[1], 40, DIM, generator=draw) for _ in range(2))
    mask = torch.zeros(3, 4, 37).masked_fill(torch.rand(3, 4, 37, generator=draw) < 0.3, -torch.inf)
    mask[:, :, 0] = 0
    wanted = attend(query, keys[:, :, :37], values[:, :, :37], mask)
    on_gpu = [x.cuda().bfloat16() for x in (query, keys, values, mask)]
    parts = on_gpu[0], on_gpu[1][:, :, :37], on_gpu[2][:, :, :37], on_gpu[3]
    with torch.profiler.profile() as profile:
        found = attend(*parts)
    assert (found.float().cpu() - wanted).norm() / wanted.norm() < 1e-2
    called = {event.key for event in profile.key_averages()}
    assert not called & {"aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_attention_math"}
