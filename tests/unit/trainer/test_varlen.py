"""Attention by sequences of different lengths, as on a GPU: its calls, with a kernel that is played here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer import varlen
from rlpipe.trainer.attention import BranchPlan, branch_attention
from rlpipe.trainer.varlen import VarlenPlan, varlen_attention
from tests.helpers.branches import DIM, forests, groups_of_answers

pytestmark = [pytest.mark.unit, pytest.mark.property]
CPU = torch.device("cpu")


class Kernel:
    """FlashAttention over sequences, one after the other by the CPU's kernel. calls: made to it."""

    def __init__(self):
        self.calls = 0

    def forward(self, q, k, v, *, sequences, scale):
        """As `varlen.varlen_forward`."""
        self.calls += 1
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = [
            flash(*(_batch(x) for x in part), 0.0, sequences.causal, scale=scale)
            for part in _sequences(sequences, [q], [k, v])
        ]
        out, norm = (torch.cat([x[0] for x in parts], 1) for parts in zip(*found, strict=True))
        return out.transpose(0, 1), norm, ()

    def backward(self, joint, q, k, v, *, sequences, scale):
        """As `varlen.varlen_backward`."""
        self.calls += 1
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = []
        rows_of_all = [joint.grad, q, joint.out, joint.norm]
        for *rows, keys, values in _sequences(sequences, rows_of_all, [k, v]):
            grad_, q_, out_, norm_, k_, v_ = (_batch(x) for x in (*rows, keys, values))
            found.append(flash(grad_, q_, k_, v_, out_, norm_, 0.0, sequences.causal, scale=scale))
        return tuple(torch.cat([x[0].transpose(0, 1) for x in parts]) for parts in zip(*found, strict=True))


def _batch(x):
    return x.transpose(0, 1)[None]


def _sequences(sequences, rows, keys):
    """Cut tensors at the bounds that the kernel is given, and check what it relies on."""
    bounds = [b.tolist() for b in (sequences.query_bounds, sequences.key_bounds)]
    lengths = [torch.tensor(b).diff() for b in bounds]
    assert tuple(int(n.max()) for n in lengths) == sequences.longest and min(map(min, lengths)) > 0
    assert all(b.dtype is torch.int32 for b in (sequences.query_bounds, sequences.key_bounds))
    assert [bounds[0][-1], bounds[1][-1]] == [len(rows[0]), len(keys[0])]
    for tensor in (*rows, *keys):
        assert tensor.is_contiguous()
    for i in range(len(bounds[0]) - 1):
        spans = [slice(b[i], b[i + 1]) for b in bounds]
        yield [*(x[spans[0]] for x in rows), *(x[spans[1]] for x in keys)]


@pytest.fixture
def kernel(monkeypatch):
    played = Kernel()
    monkeypatch.setattr(varlen, "varlen_forward", played.forward)
    monkeypatch.setattr(varlen, "varlen_backward", played.backward)
    return played


def both(branches, heads, groups, seed, selected=None):
    """Values and gradients of q, k, v by the calls of a GPU and of a CPU."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(branch.length for branch in branches)
    chosen = range(len(branches)) if selected is None else selected
    queries = sum(branches[i].length for i in chosen)
    sizes = (heads, queries), (groups, tokens), (groups, tokens)
    inputs = [torch.randn(1, n, count, DIM, generator=draw, dtype=torch.float64) for n, count in sizes]
    weights = torch.randn(1, heads, queries, DIM, generator=draw, dtype=torch.float64)
    found = []
    for attend, plan in ((varlen_attention, VarlenPlan), (branch_attention, BranchPlan)):
        qkv = [x.clone().requires_grad_() for x in inputs]
        out = attend(*qkv, plan=plan(branches, selected, CPU), scale=0.4)
        found.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=st.sampled_from([(4, 4), (4, 2), (2, 1)]), seed=st.integers(0, 2**31))
def test_its_values_and_gradients_are_those_of_one_call_for_each_branch(data, shape, seed):
    branches = data.draw(forests())
    some = data.draw(st.none() | st.sets(st.integers(0, len(branches) - 1), min_size=1).map(sorted))
    with pytest.MonkeyPatch.context() as patch:
        kernel = Kernel()
        patch.setattr(varlen, "varlen_forward", kernel.forward)
        patch.setattr(varlen, "varlen_backward", kernel.backward)
        for mine, by_branch in zip(*both(branches, *shape, seed, some), strict=True):
            torch.testing.assert_close(mine, by_branch, rtol=0, atol=1e-12)


def test_two_calls_attend_from_all_branches_and_two_make_the_gradient(kernel):
    """Where the CPU takes one for each length and each context."""
    branches = groups_of_answers()
    plan = BranchPlan(branches, None, CPU)
    assert len(plan.siblings) + len(plan.buckets) > 8
    both(branches, 4, 2, 0)
    assert kernel.calls == 4
    kernel.calls = 0
    both([Branch(length=5, context=[])] * 3, 4, 2, 0)
    assert kernel.calls == 2, "no branch has a context"


def test_keys_that_branches_share_are_read_once_for_all_that_follow_the_same_tokens():
    plan = VarlenPlan(groups_of_answers(), None, CPU)
    assert plan.to_context is not None and len(plan.to_context.key_bounds) == 1 + 4
    assert len(plan.to_context.keys) == 21 + 23 + 9 + 11


def test_a_context_that_is_attended_to_causally_is_noticed(kernel):
    branches = groups_of_answers()
    plan = VarlenPlan(branches, None, CPU)
    plan.to_context = plan.to_context._replace(causal=True)
    tokens = sum(branch.length for branch in branches)
    q, k, v = (torch.randn(1, 2, tokens, DIM, dtype=torch.float64) for _ in range(3))
    wrong = varlen_attention(q, k, v, plan=plan, scale=0.4)
    right = branch_attention(q, k, v, plan=BranchPlan(branches, None, CPU), scale=0.4)
    assert (wrong - right).abs().max() > 0.1


def test_the_kernels_of_a_gpu_take_what_they_are_given():
    """By their operators' own check of shapes and types, on tensors without memory."""
    branches, meta = groups_of_answers(), torch.device("meta")
    tokens = sum(branch.length for branch in branches)
    shapes = [(1, 4, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64)]
    qkv = [torch.empty(s, dtype=torch.bfloat16, device=meta, requires_grad=True) for s in shapes]
    out = varlen_attention(*qkv, plan=VarlenPlan(branches, None, meta), scale=0.1)
    assert out.shape == shapes[0] and out.dtype is torch.bfloat16
    grads = torch.autograd.grad(out.sum(), qkv)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(s, torch.bfloat16) for s in shapes]
