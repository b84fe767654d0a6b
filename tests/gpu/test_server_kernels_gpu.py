"""The server's kernels on a GPU: verdicts of the torch code, captured in a CUDA graph or not."""

import importlib

import pytest
import torch

from tests.integration.test_server_kernels import PLUGIN, a_batch

pytestmark = pytest.mark.gpu


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    return lambda name: importlib.import_module(f"rlpipe_sglang.{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "depths"), [(1, 3), (8, 0), (64, 3)])
def test_kernels_judge_as_torch_does(module, batch, depths, dtype):
    given = [x.cuda() for x in a_batch(batch, depths, 151_936, dtype)]
    known = module("verify").verify(*given[:2], given[2].float(), *given[3:])
    found = module("verify").Verdict(*module("kernels").verify(*given))
    assert torch.equal(found.accepted, known.accepted) and torch.equal(found.tokens, known.tokens)
    emitted = torch.arange(depths + 1, device="cuda") <= found.accepted[:, None]
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(
            getattr(found, name)[emitted], getattr(known, name)[emitted], atol=1e-4, rtol=1e-5
        )


def test_every_replay_of_a_captured_draw_draws_anew_and_keeps_its_logits(module):
    logits, temperatures = (
        torch.randn(64, 151_936, device="cuda").bfloat16(),
        torch.ones(64, 1, device="cuda"),
    )
    module("kernels").draw(logits, temperatures)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z, drafts = module("kernels").draw(logits, temperatures)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(drafts.clone())
    assert torch.equal(z, logits.float()) and not torch.equal(*seen)


def test_drafts_have_the_law_that_is_kept(module):
    """Pearson's test of 2 ** 20 drafts, 7 degrees of freedom, alpha 1e-4."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0], device="cuda").expand(2**20, 8)
    torch.manual_seed(0)
    _, drafts = module("kernels").draw(logits, torch.ones(2**20, 1, device="cuda"))
    expected = logits[0].double().softmax(-1) * 2**20
    assert ((drafts[:, 0].bincount(minlength=8) - expected) ** 2 / expected).sum().item() < 29.9
