"""Injected faults against an engine that notes what it is asked."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlpipe.config.injection import InjectionConfig
from rlpipe.rollout.injection import InjectedEngine, with_noise
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams, SpecCounts

pytestmark = pytest.mark.unit


class NotingEngine:
    """Answers two tokens and notes requests, aborts and the weights it is given."""

    def __init__(self, finish=FinishReason.STOP):
        self.requests, self.served, self.aborted, self.finish = [], [], [], finish
        self.hang_on = None  # suffix of the request that never returns

    async def generate(self, request):
        self.requests.append(request)
        if self.hang_on and request.request_id.endswith(self.hang_on):
            await asyncio.Event().wait()
        lines = {"logprobs": [0.0] * 2, "entropies": [0.0] * 2, "versions": [0] * 2}
        return GenerateResult(
            request_id=request.request_id,
            output_ids=[7, 1],
            finish_reason=self.finish,
            spec=SpecCounts(),
            **lines,
        )

    def abort(self, request_ids=None):
        self.aborted.append(request_ids)

    def update_weights(self, weights, version):
        self.served.append((version, {name: weight.clone() for name, weight in weights.items()}))


def weights(version):
    return {"a": torch.full((3,), float(version)), "b": torch.arange(1.0, 5).bfloat16()}


def request(seed=0):
    sampling = SamplingParams(seed=seed, max_new_tokens=5, stop_token_ids=(1,), top_logprobs=4)
    return GenerateRequest(request_id=f"r{seed}", prompt_ids=[1, 2, 3], sampling=sampling, session_id="s")


def generate(engine, one):
    return asyncio.run(asyncio.wait_for(engine.generate(one), 10))


def serving(versions, stale):
    """Version served after each of the published ones."""
    inner = NotingEngine()
    engine, found = InjectedEngine(inner, InjectionConfig(stale_steps=stale), max_context=100), []
    for version in versions:
        published = weights(version)
        engine.update_weights(published, version)
        published["a"].zero_()  # the trainer goes on writing into its buffer
        found.append(inner.served[-1][0] if inner.served else 0)
    assert all((given["a"] == version).all() for version, given in inner.served)
    return found


def test_weights_are_served_so_many_steps_late():
    assert serving(range(1, 7), stale=2) == [0, 0, 1, 2, 3, 4]
    assert serving(range(1, 4), stale=0) == [1, 2, 3]


def test_after_a_restart_the_newest_weights_are_served_until_they_are_old_enough():
    assert serving(range(10, 15), stale=3) == [10, 10, 10, 10, 11]


def test_noise_is_relative_new_with_each_version_and_there_from_the_start():
    inner = NotingEngine()
    engine = InjectedEngine(inner, InjectionConfig(weight_noise=0.01), max_context=100, weights=weights(5))
    for version in (1, 2):
        engine.update_weights(weights(5), version)
    assert [version for version, _ in inner.served] == [0, 1, 2]
    noisy = [given["a"] for _, given in inner.served]
    assert all(0 < (x - 5).abs().max() < 0.3 for x in noisy)
    assert not torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[1], noisy[2])
    assert inner.served[0][1]["b"].dtype is torch.bfloat16
    big = with_noise({"w": torch.full((100_000,), 3.0)}, 0.02, version=4)["w"]
    assert (big / 3 - 1).std().item() == pytest.approx(0.02, rel=0.02)
    with pytest.raises(ValueError, match="weights of the start"):
        InjectedEngine(inner, InjectionConfig(weight_noise=0.01), max_context=100)


def test_a_long_turn_decodes_on_and_returns_what_it_was():
    inner = NotingEngine()
    engine = InjectedEngine(inner, InjectionConfig(long_turn_share=1.0, long_turn_tokens=50), max_context=30)
    result = generate(engine, request())
    assert result.request_id == "r0" and result.output_ids.tolist() == [7, 1]
    _, longer = inner.requests
    assert longer.prompt_ids.tolist() == [1, 2, 3, 7, 1] and longer.session_id is None
    assert longer.sampling.max_new_tokens == 25  # what the context has room for
    assert longer.sampling.stop_token_ids == () and longer.sampling.top_logprobs == 0


def test_the_asked_share_of_turns_is_long_and_a_repetition_draws_the_same():
    config, drawn = InjectionConfig(long_turn_share=0.2, long_turn_tokens=4), []
    for _ in range(2):
        inner = NotingEngine()
        engine = InjectedEngine(inner, config, max_context=100)
        for seed in range(400):
            generate(engine, request(seed))
        drawn.append([r.request_id for r in inner.requests if r.request_id.endswith("/long")])
    assert drawn[0] == drawn[1]
    assert 50 < len(drawn[0]) < 110  # 80, standard deviation 8


def test_an_aborted_turn_is_not_prolonged_and_a_cancelled_one_frees_the_engine():
    config = InjectionConfig(long_turn_share=1.0, long_turn_tokens=4)
    inner = NotingEngine(FinishReason.ABORT)
    generate(InjectedEngine(inner, config, max_context=100), request())
    assert len(inner.requests) == 1

    async def cancelled():
        inner = NotingEngine()
        inner.hang_on = "/long"
        task = asyncio.ensure_future(InjectedEngine(inner, config, max_context=100).generate(request()))
        while len(inner.requests) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return inner.aborted

    assert asyncio.run(asyncio.wait_for(cancelled(), 10)) == [["r0/long"]]
