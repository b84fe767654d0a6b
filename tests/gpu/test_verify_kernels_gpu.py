"""The verification kernels on a CUDA device at production sizes. Chosen uniforms: tests/integration."""

from __future__ import annotations

import pytest
import torch

from rlpipe.spec import kernels
from tests.helpers.kernel_cases import RULES, assert_equal_to_reference, random_case

pytestmark = pytest.mark.gpu
VOCAB = 151_936


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("batch", "gamma"), [(1, 1), (8, 3), (32, 5)])
def test_verdicts_on_the_gpu_equal_the_reference_on_the_cpu(rule, batch, gamma):
    case = random_case(batch, gamma, VOCAB, seed=gamma, padding=267)
    case.accept_uniforms[::2] *= 0.1  # deep rows too
    assert_equal_to_reference(rule, case, "cuda")


@pytest.mark.parametrize("rule", RULES)
def test_a_captured_graph_gives_the_verdict_of_its_current_inputs(rule):
    """Capture fails where a call waits for the device."""
    first, second = (random_case(4, 3, 4097, seed=s).map(lambda x: x.cuda()) for s in (1, 2))
    verify = getattr(kernels, rule)
    wanted = verify(*second.arguments(rule))
    graph = torch.cuda.CUDAGraph()
    arguments = first.arguments(rule)
    with torch.cuda.graph(graph):
        ours = verify(*arguments)
    for mine, new in zip(arguments, second.arguments(rule), strict=True):
        if mine is not None:
            mine.copy_(new)
    graph.replay()
    for name in ("num_accepted", "next_token", "accept_prob"):
        assert torch.equal(getattr(ours, name), getattr(wanted, name))


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_judged_alike_alone_and_in_a_large_batch(rule):
    case = random_case(32, 3, VOCAB).map(lambda x: x.cuda())
    whole = getattr(kernels, rule)(*case.arguments(rule))
    for row in (0, 31):
        alone = getattr(kernels, rule)(*case.map(lambda x, row=row: x[row : row + 1]).arguments(rule))
        for name in ("num_accepted", "next_token", "accept_prob"):
            assert torch.equal(getattr(alone, name), getattr(whole, name)[row : row + 1])
