"""The delta rule over branches is the recurrence of each trajectory alone, token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from rlpipe.batching.micro_batch import Branch, first_tokens
from rlpipe.trainer import delta_net
from rlpipe.trainer.delta_net import Succession, delta_rule

pytestmark = pytest.mark.unit

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
CPU = torch.device("cpu")


def gates(tensors):
    return {"g": tensors[3], "beta": tensors[4]}


def random_branches(seed, longest, count=9):
    """Branches that start anywhere in the trajectory before, or anew; contexts of several pieces occur."""
    random = np.random.default_rng(seed)
    branches, path = [], []
    for index in range(count):
        shared = int(random.integers(0, sum(n for _, n in path) + 1)) if path else 0
        path = first_tokens(path, 0 if random.random() < 0.2 else shared)
        branches.append(Branch(length=int(random.integers(1, longest)), context=path))
        path = [*path, (index, branches[-1].length)]
    return branches


def trajectories(branches):
    """For each branch the flat tokens of its trajectory, and which of those are its own."""
    starts = np.cumsum([0, *(branch.length for branch in branches)])
    for branch, start in zip(branches, starts[:-1], strict=True):
        context = [np.arange(starts[j], starts[j] + count) for j, count in branch.context]
        own = np.arange(start, start + branch.length)
        yield np.concatenate([*context, own]), own


def inputs(tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(tokens, *shape, generator=generator, dtype=dtype)

    q, k = random(KEY_HEADS, KEY_DIM), random(KEY_HEADS, KEY_DIM)
    v, g, beta = random(VALUE_HEADS, VALUE_DIM), -random(VALUE_HEADS).abs(), random(VALUE_HEADS).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def recurrence(q, k, v, g, beta, state=None):
    """Equation 10 of the paper, one token after the other; queries and keys of each value head, normed."""
    if state is None:
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
    outputs = []
    for t in range(len(v)):
        state = g[t].exp()[:, None, None] * state
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / KEY_DIM**0.5)
    return torch.stack(outputs), state


def of_each_alone(branches, q, k, v, g, beta):
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, dim=1) for x in (q, k)
    )
    found = []
    for tokens, own in trajectories(branches):
        outputs, _ = recurrence(*(x[tokens] for x in (q, k, v, g, beta)))
        found.append(outputs[len(tokens) - len(own) :])
    return torch.cat(found)


@pytest.mark.parametrize("longest", [5, 150])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_and_gradients_are_those_of_each_trajectory_alone(seed, longest):
    branches = random_branches(seed, longest)
    given = inputs(sum(branch.length for branch in branches))
    expected = of_each_alone(branches, *given)
    found = delta_rule(*given[:3], **gates(given), succession=Succession(branches, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), given),
        torch.autograd.grad((expected * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_branches_that_fork_within_pieces_of_several_branches_are_among_those_tested():
    lists = [random_branches(seed, 150) for seed in range(4)]
    assert any(len(branch.context) > 2 for branches in lists for branch in branches)
    forks = [
        (b[branch.context[-1][0]], branch.context[-1][1]) for b in lists for branch in b if branch.context
    ]
    assert any(count < forked.length for forked, count in forks)


def test_a_state_that_is_not_continued_shows():
    """Each branch by itself, as if its context were not there."""
    branches = random_branches(0, 40)
    given = inputs(sum(branch.length for branch in branches))
    wrong = [Branch(length=branch.length, context=[]) for branch in branches]
    right, found = (
        delta_rule(*given[:3], **gates(given), succession=Succession(b, CPU)) for b in (branches, wrong)
    )
    assert (right - found).abs().max() > 1e-2


def test_steep_decay_in_float32_gives_no_infinities():
    """exp(b_i - b_j) with j after i would overflow."""
    branches = [Branch(length=200, context=[])]
    q, k, v, g, beta = inputs(200, torch.float32)
    g = (50 * g).detach().requires_grad_()
    found = delta_rule(q, k, v, g=g, beta=beta, succession=Succession(branches, CPU))
    found.square().sum().backward()
    assert found.isfinite().all() and all(x.grad.isfinite().all() for x in (q, k, v, g, beta))
    torch.testing.assert_close(found, of_each_alone(branches, q, k, v, g, beta), rtol=1e-4, atol=1e-5)


def test_a_kernel_over_packed_segments_gives_the_same(monkeypatch):
    """With a stand-in for fla's kernel: the recurrence over segments, from the states it is given."""

    def kernel(q, k, v, *, g, beta, initial_state, output_final_state, cu_seqlens):
        assert output_final_state and len(q) == 1
        outputs, states = [], []
        for number, (start, end) in enumerate(pairwise(cu_seqlens)):
            before = None if initial_state is None else initial_state[number]
            out, state = recurrence(*(x[0, start:end] for x in (q, k, v, g, beta)), before)
            outputs.append(out)
            states.append(state)
        return torch.cat(outputs)[None], torch.stack(states)

    branches = random_branches(1, 60)
    given = inputs(sum(branch.length for branch in branches))
    q, k = (delta_net._l2_normed(x).repeat_interleave(2, dim=1) for x in given[:2])
    monkeypatch.setattr(delta_net, "fla_kernel", kernel)
    found = delta_net._by_generations(q, k, given[2], **gates(given), succession=Succession(branches, CPU))
    torch.testing.assert_close(found, of_each_alone(branches, *given), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_before_a_segment_are_those_of_its_trajectory(seed):
    branches = random_branches(seed, 7)
    succession = Succession(branches, CPU)
    index, places = succession.extended(3)
    for tokens, own in trajectories(branches):
        line = [-1, -1, -1, *tokens.tolist()]
        for token in own.tolist():
            place, at = int(places[token]), 3 + tokens.tolist().index(token)
            assert index[place - 3 : place + 1].tolist() == line[at - 3 : at + 1]


def test_depths_are_those_of_the_longest_trajectory_alone():
    """Siblings of 1024 tokens after a prompt of 512: 8 + 16 steps in sequence, whatever their number."""
    branches = [Branch(length=512, context=[])] + [Branch(length=1024, context=[(0, 512)])] * 8
    assert len(Succession(branches, CPU).chunks(64)[2]) == 24


def test_a_context_that_is_no_start_of_a_trajectory_is_refused():
    branches = [Branch(length=3, context=[]), Branch(length=3, context=[(0, 2)])]
    with pytest.raises(AssertionError, match="start of a trajectory"):
        Succession([*branches, Branch(length=1, context=[(0, 3), (1, 1)])], CPU)
