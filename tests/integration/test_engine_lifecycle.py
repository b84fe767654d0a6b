"""Threads, aborts, weight updates and failures of the embedded engine."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from rlpipe.models.checkpoint import MTP_PREFIX, read_weights
from rlpipe.types import FinishReason
from tests.helpers.engines import generate, recomputed, request, running_engine, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
MODES = ("none", "rejection")
PROMPT = [3, 14, 15, 9, 26, 5]
LONG = 100
SLOW_STEP = 0.02  # seconds


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [write_random_checkpoint(tmp_path_factory.mktemp(f"m{seed}"), seed=seed) for seed in (0, 1)]


@contextmanager
def _slowed(engine):
    """Steps are slow until the event is set: on a busy machine a request would be over before a test acts."""
    step, over = engine._decoder.step, threading.Event()

    def slowed(*args, **kwargs):
        over.wait(SLOW_STEP)
        return step(*args, **kwargs)

    engine._decoder.step = slowed
    try:
        yield over
    finally:
        engine._decoder.step = step


async def _tokens_exist(engine, tokens):
    while engine.stats().generated_tokens < tokens:
        await asyncio.sleep(0.0005)


def _while_decoding(engine, act, *requests, after_tokens: int = 20):
    """Start requests, run `act` in a thread once some tokens exist, return the results."""

    async def run(over):
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in requests]
        await _tokens_exist(engine, after_tokens)
        await asyncio.to_thread(act)
        over.set()
        return await asyncio.gather(*tasks)

    with _slowed(engine) as over:
        return asyncio.run(run(over))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_every_token_carries_the_version_that_sampled_it(checkpoints, mode, kv_on_update):
    old, new = (transformers_logits(path) for path in checkpoints)
    with running_engine(checkpoints[0], mode, kv_on_update=kv_on_update) as engine:
        (result,) = _while_decoding(
            engine,
            lambda: engine.update_weights(read_weights(checkpoints[1]), 7),
            request(0, PROMPT, max_new_tokens=LONG),
        )
        assert engine.stats().policy_version == 7
        (fresh,) = generate(engine, request(1, PROMPT, max_new_tokens=30))
    switch = result.versions.tolist().index(7)
    assert 20 <= switch < LONG
    assert result.versions.tolist() == [0] * switch + [7] * (LONG - switch)
    ours = torch.tensor(result.logprobs)
    before, after = recomputed(old, PROMPT, result)[0], recomputed(new, PROMPT, result)[0]
    assert (ours - before)[:switch].abs().max() < 1e-4
    error = (ours - after)[switch:].abs().max()
    # Recomputed keys give exactly the new model; kept ones are the old model's and must show.
    assert error < 1e-4 if kv_on_update == "recompute" else error > 1e-3
    assert set(fresh.versions.tolist()) == {7}
    assert (torch.tensor(fresh.logprobs) - recomputed(new, PROMPT, fresh)[0]).abs().max() < 1e-4


def test_an_idle_conversation_is_forgotten_on_recompute_and_kept_on_keep(checkpoints):
    for kv_on_update, reused in (("keep", True), ("recompute", False)):
        with running_engine(checkpoints[0], kv_on_update=kv_on_update) as engine:
            (first,) = generate(engine, request(0, PROMPT, session="s", max_new_tokens=10))
            engine.update_weights(read_weights(checkpoints[1]), 1)
            before = engine.stats().prefill_tokens
            longer = [*PROMPT, *first.output_ids.tolist(), 4]
            generate(engine, request(1, longer, session="s", max_new_tokens=4))
            assert (engine.stats().prefill_tokens - before < len(longer)) is reused


def test_the_draft_is_replaced_too(checkpoints):
    """With only the draft replaced by garbage, outputs stay lossless and acceptance changes."""
    weights = read_weights(checkpoints[0])
    with running_engine(checkpoints[0]) as engine:
        (first,) = generate(engine, request(0, PROMPT, max_new_tokens=LONG))
        changed = {k: v * 3 if k == f"{MTP_PREFIX}final_layernorm.weight" else v for k, v in weights.items()}
        engine.update_weights(changed, 1)
        (second,) = generate(engine, request(0, PROMPT, max_new_tokens=LONG))
    assert first.spec.accepted != second.spec.accepted
    reference = transformers_logits(checkpoints[0])
    assert (torch.tensor(second.logprobs) - recomputed(reference, PROMPT, second)[0]).abs().max() < 1e-4


def test_the_caller_may_change_its_tensors_after_an_update(checkpoints):
    weights = {name: tensor.clone() for name, tensor in read_weights(checkpoints[1]).items()}
    with running_engine(checkpoints[0]) as engine:
        engine.update_weights(weights, 1)
        for tensor in weights.values():
            tensor.zero_()
        (result,) = generate(engine, request(0, PROMPT, max_new_tokens=30))
    reference = transformers_logits(checkpoints[1])
    assert (torch.tensor(result.logprobs) - recomputed(reference, PROMPT, result)[0]).abs().max() < 1e-4


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(checkpoints):
    weights = read_weights(checkpoints[1])
    missing = {k: v for k, v in weights.items() if k != "model.norm.weight"}
    with running_engine(checkpoints[0]) as engine:
        (before,) = generate(engine, request(0, PROMPT, max_new_tokens=20))
        with pytest.raises(ValueError, match=r"missing model\.norm\.weight"):
            engine.update_weights(missing, 1)
        with pytest.raises(ValueError, match=r"unknown model\.layers\.9\.x"):
            engine.update_weights(weights | {"model.layers.9.x": torch.zeros(1)}, 1)
        with pytest.raises(ValueError, match=r"model\.norm\.weight \(7,\) instead of \(32,\)"):
            engine.update_weights(weights | {"model.norm.weight": torch.zeros(7)}, 1)
        with pytest.raises(ValueError, match=r"missing model\.mtp_layers\.0\."):
            engine.update_weights({k: v for k, v in weights.items() if not k.startswith(MTP_PREFIX)}, 1)
        (after,) = generate(engine, request(0, PROMPT, max_new_tokens=20))
        assert engine.stats().policy_version == 0
    assert after.output_ids.tolist() == before.output_ids.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_abort_returns_what_exists_and_leaves_the_others_alone(checkpoints, mode):
    with running_engine(checkpoints[0], mode, max_running=3) as engine:
        whole = generate(engine, *(request(i, PROMPT, max_new_tokens=LONG) for i in range(5)))
        aborted = _while_decoding(
            engine,
            lambda: engine.abort(["1", "4"]),
            *(request(i, PROMPT, max_new_tokens=LONG) for i in range(5)),
            after_tokens=5 * LONG + 30,
        )
    for i, (one, all_of_it) in enumerate(zip(aborted, whole, strict=True)):
        assert one.output_ids.tolist() == all_of_it.output_ids.tolist()[: len(one.output_ids)]
        assert one.finish_reason is (FinishReason.ABORT if i in (1, 4) else FinishReason.LENGTH)
    assert 0 < len(aborted[1].output_ids) < LONG
    assert aborted[4].output_ids.tolist() == []  # it was still waiting for a row
    assert len(aborted[0].output_ids) == LONG


def test_a_cancelled_caller_frees_its_row(checkpoints):
    async def run(engine, over):
        task = asyncio.ensure_future(engine.generate(request(0, PROMPT, max_new_tokens=LONG)))
        await _tokens_exist(engine, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        over.set()
        return await engine.generate(request(0, PROMPT, max_new_tokens=5))

    with running_engine(checkpoints[0], max_running=1) as engine, _slowed(engine) as over:
        assert len(asyncio.run(run(engine, over)).output_ids) == 5
        assert engine.stats().generated_tokens < LONG


def test_pause_stops_between_steps_and_updates_work_meanwhile(checkpoints):
    with running_engine(checkpoints[0]) as engine:

        def pause_and_update():
            engine.pause()
            tokens = engine.stats().generated_tokens
            time.sleep(0.05)
            assert engine.stats().generated_tokens == tokens
            engine.update_weights(read_weights(checkpoints[1]), 3)
            assert engine.stats().generated_tokens == tokens
            engine.resume()

        (result,) = _while_decoding(engine, pause_and_update, request(0, PROMPT, max_new_tokens=LONG))
    assert (len(result.output_ids), result.versions[0], result.versions[-1]) == (LONG, 0, 3)


def test_requests_from_two_event_loops_at_once(checkpoints):
    with running_engine(checkpoints[0]) as engine:
        (expected,) = generate(engine, request("x", PROMPT, max_new_tokens=40))
        found = {}

        def worker(name):
            found[name] = generate(
                engine, *(request(f"{name}{i}", PROMPT, max_new_tokens=40) for i in range(5))
            )

        threads = [threading.Thread(target=worker, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(
        r.output_ids.tolist() == expected.output_ids.tolist() for results in found.values() for r in results
    )


def test_close_answers_everyone_and_later_calls_say_so(checkpoints):
    with running_engine(checkpoints[0], max_running=1) as engine:
        results = _while_decoding(
            engine, engine.close, *(request(i, PROMPT, max_new_tokens=LONG) for i in range(3)), after_tokens=5
        )
        assert {result.finish_reason for result in results} == {FinishReason.ABORT}
        with pytest.raises(RuntimeError, match="closed"):
            generate(engine, request(9, PROMPT))
        with pytest.raises(RuntimeError, match="closed"):
            engine.update_weights(read_weights(checkpoints[0]), 1)


def test_an_exception_in_the_thread_reaches_every_caller(checkpoints, monkeypatch):
    with running_engine(checkpoints[0], max_running=2) as engine:

        def broken(*args, **kwargs):
            raise FloatingPointError("planted")

        async def run():
            tasks = [engine.generate(request(i, PROMPT, max_new_tokens=LONG)) for i in range(4)]
            return await asyncio.gather(*tasks, return_exceptions=True)

        monkeypatch.setattr(engine._decoder, "step", broken)
        errors = asyncio.run(asyncio.wait_for(run(), 60))
        assert [str(error) for error in errors] == ["planted"] * 4
        with pytest.raises(RuntimeError, match="planted"):
            generate(engine, request(9, PROMPT))
        with pytest.raises(RuntimeError, match="planted"):
            engine.pause()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "is empty"),
        ({"prompt": [3, 64]}, r"outside 0\.\.63"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -0.5}, "temperature and top_logprobs at least 0"),
    ],
)
def test_impossible_requests_are_refused_before_they_are_queued(checkpoints, change, message):
    with running_engine(checkpoints[0]) as engine:
        with pytest.raises(ValueError, match=message):
            generate(engine, request(0, **({"prompt": PROMPT} | change)))
        assert len(generate(engine, request(0, PROMPT, max_new_tokens=3))[0].output_ids) == 3


def test_equal_request_ids_at_once_are_refused(checkpoints):
    with running_engine(checkpoints[0]) as engine, pytest.raises(ValueError, match="already running"):
        generate(engine, request(0, PROMPT), request(0, PROMPT))
