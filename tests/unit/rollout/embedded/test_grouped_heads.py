"""Attention over cached keys by the heads of a group together, as a GPU's kernel needs it."""

import pytest
import torch

from rlpipe.rollout.embedded.attention import attend, attend_grouped

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("length", [5, 16])
def test_heads_of_a_group_as_further_queries_attend_as_by_themselves(heads, kv_heads, length, dtype):
    draw = torch.Generator().manual_seed(heads + length)
    query = torch.randn(3, 4, heads, 8, generator=draw).to(dtype)
    keys, values = (torch.randn(3, kv_heads, length + 3, 8, generator=draw).to(dtype) for _ in range(2))
    keys, values = keys[:, :, :length], values[:, :, :length]  # views of a cache
    unseen = torch.rand(3, 4, length, generator=draw) < 0.4
    unseen[:, :, 0] = False
    mask = torch.zeros(3, 4, length).masked_fill(unseen, -torch.inf).to(dtype)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-2
    for scale in (None, 0.3):
        parts = query, keys, values, mask, scale
        torch.testing.assert_close(attend_grouped(*parts), attend(*parts), rtol=0, atol=tolerance)


def test_the_kernel_of_a_gpu_takes_what_it_is_given():
    """By its operator's own check of shapes and types, on tensors without memory."""
    with torch.device("meta"):
        query = torch.empty(3, 4, 6, 64, dtype=torch.bfloat16)
        keys, values = (torch.empty(3, 2, 40, 64, dtype=torch.bfloat16)[:, :, :37] for _ in range(2))
        attended = attend_grouped(query, keys, values, torch.empty(3, 4, 37))
    assert attended.shape == (12, 6 * 64) and attended.dtype is torch.bfloat16
