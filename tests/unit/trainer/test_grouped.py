"""Experts computed together give what Megatron's loop over experts gives, and its gradients."""

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from rlpipe.trainer.grouped import GroupedExperts, grouped_linear
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_trainer

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The experts of a trainer's first layer, in float64."""
    trainer = make_trainer(write_random_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3_moe"))
    layers = [m for m in trainer.model.modules() if isinstance(m, SequentialMLP)]
    yield layers[0].double()
    trainer.close()


def outcome(experts, forward, *, empty):
    """Outputs, and gradients of tokens, router weights and every expert's matrices."""
    generator = torch.Generator().manual_seed(0)
    hidden, count = experts.config.hidden_size, experts.num_local_experts
    counts = torch.randint(1, 5, (count,), generator=generator)
    counts[1] = 0 if empty else counts[1]
    total = int(counts.sum())
    tokens = torch.randn(total, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(total, generator=generator, dtype=torch.float64, requires_grad=True)
    found, _ = forward(experts, tokens, counts, weights)
    parameters = list(experts.parameters())
    found.pow(3).sum().backward(inputs=[tokens, weights, *parameters])
    gradients = [tokens.grad, weights.grad, *(p.grad for p in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return [found, *gradients]


def test_the_trainer_computes_its_experts_together(experts):
    assert type(experts) is GroupedExperts and experts.num_local_experts > 2


@pytest.mark.parametrize("empty", [False, True])
def test_outputs_and_gradients_equal_those_of_the_loop_within_1e_10(experts, empty):
    grouped = outcome(experts, GroupedExperts.forward, empty=empty)
    looped = outcome(experts, SequentialMLP.forward, empty=empty)
    for ours, theirs in zip(grouped, looped, strict=True):
        assert ours is not None  # also for an expert without tokens
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert (ours - theirs).abs().max() <= 1e-10


def test_a_matrix_of_another_expert_would_be_noticed(experts):
    honest = outcome(experts, GroupedExperts.forward, empty=False)

    def rotated(module, tokens, counts, weights):
        return GroupedExperts.forward(module, tokens, counts.roll(1), weights)

    assert (outcome(experts, rotated, empty=False)[0] - honest[0]).abs().max() > 1e-6


def test_the_one_kernel_of_a_gpu_computes_the_same_products(monkeypatch):
    """torch runs it on a CPU, too, for the types it has."""
    x = torch.randn(13, 16, dtype=torch.bfloat16)
    counts = torch.tensor([4, 0, 9])
    made = [torch.randn(8, 16, dtype=torch.bfloat16) for _ in counts]

    def products():
        leaves = [t.clone().requires_grad_() for t in (x, *made)]
        y = grouped_linear(leaves[0], counts, leaves[1:])
        y.float().square().sum().backward()
        return [y, *(leaf.grad for leaf in leaves)]

    one_by_one = products()
    monkeypatch.setattr("rlpipe.trainer.grouped._by_kernel", lambda *_: True)
    for ours, theirs in zip(one_by_one, products(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
