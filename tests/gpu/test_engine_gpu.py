"""The embedded engine on a CUDA device: the same numbers as on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlpipe.models.checkpoint import read_weights
from tests.helpers.engines import generate, recomputed, request, running_engine, transformers_logits
from tests.helpers.sglang import perturbed
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.gpu
MODES = ("none", "target_only", "rejection")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("mimo"), hidden=64)


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_on_the_gpu_equal_transformers_on_the_cpu(checkpoint, mode):
    prompts = [[3 + i, 9, 27, 4 + i] * (1 + i) for i in range(12)]
    with running_engine(checkpoint, mode, device="cuda") as engine:
        results = generate(engine, *(request(i, p, max_new_tokens=32) for i, p in enumerate(prompts)))
    reference = transformers_logits(checkpoint)
    for prompt, result in zip(prompts, results, strict=True):
        logprobs, _ = recomputed(reference, prompt, result)
        assert (logprobs - torch.tensor(result.logprobs)).abs().max() < 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_on_the_gpu_equals_the_cpu(checkpoint, mode):
    requests = [request(i, [5, 6 + i, 7], max_new_tokens=24, temperature=0.0) for i in range(6)]
    with running_engine(checkpoint, mode, device="cuda") as engine:
        on_gpu = generate(engine, *requests)
    with running_engine(checkpoint, mode) as engine:
        on_cpu = generate(engine, *requests)
    assert [r.output_ids.tolist() for r in on_gpu] == [r.output_ids.tolist() for r in on_cpu]


@pytest.mark.parametrize("mode", (*MODES, "tree"))
def test_captured_passes_say_what_passes_say(checkpoint, mode):
    """Batches that shrink as turns end, conversations that come back, and weights that change."""
    found = []
    for graphs in (True, False):
        with running_engine(checkpoint, mode, device="cuda", cuda_graphs=graphs) as engine:
            turns = []
            for turn in range(3):
                asked = (
                    request(f"{turn} {i}", [3 + i, 9, 4 + turn] * (1 + i), f"{i}", max_new_tokens=4 + 5 * i)
                    for i in range(6)
                )
                turns += generate(engine, *asked)
                engine.update_weights(perturbed(read_weights(checkpoint), 0.02, seed=turn), 1 + turn)
            assert engine._model._graphs._usable == graphs
        found.append(turns)
    for one, other in zip(*found, strict=True):
        assert (
            one.output_ids.tolist() == other.output_ids.tolist()
            and one.versions.tolist() == other.versions.tolist()
        )
        assert torch.tensor(one.logprobs).sub(torch.tensor(other.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_weights_on_either_device_replace_those_on_the_gpu(checkpoint, kv_on_update):
    weights = {name: tensor.cuda() for name, tensor in read_weights(checkpoint).items()}
    with running_engine(checkpoint, device="cuda", kv_on_update=kv_on_update) as engine:
        (before,) = generate(engine, request(0, [3, 4, 5], max_new_tokens=24))
        engine.update_weights(weights, 2)
        (after,) = generate(engine, request(0, [3, 4, 5], max_new_tokens=24))
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert set(after.versions.tolist()) == {2}


def test_bfloat16_conversations_run_on_the_gpu(checkpoint):
    with running_engine(checkpoint, device="cuda", dtype="bfloat16", max_running=3) as engine:
        ids = {str(i): [3 + i, 4, 5] for i in range(5)}
        for turn in range(3):
            results = generate(
                engine, *(request(f"{turn}{s}", p, session=s, max_new_tokens=8) for s, p in ids.items())
            )
            for (session, prompt), result in zip(list(ids.items()), results, strict=True):
                assert len(result.output_ids) == 8
                ids[session] = [*prompt, *result.output_ids.tolist(), 7]
