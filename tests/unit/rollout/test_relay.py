"""Turns of a worker that leaves: what it had decoded stays, the rest is another engine's, nothing is lost."""

import asyncio
from types import SimpleNamespace

import pytest

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.config.env import EnvConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.rollout.collector import Collector
from rlpipe.rollout.engine import EngineStats
from rlpipe.rollout.relay import RelayEngine
from rlpipe.rollout.turn import empty_result
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, Prompt, SamplingParams, SpecCounts
from tests.unit.rollout.test_recorded_drafts import Chat, Suite

pytestmark = pytest.mark.unit


def said(request, ids, version, reason=FinishReason.STOP):
    return GenerateResult(
        request_id=request.request_id,
        output_ids=list(ids),
        logprobs=[-0.1 * version] * len(ids),
        entropies=[0.2] * len(ids),
        versions=[version] * len(ids),
        finish_reason=reason,
        spec=SpecCounts(),
    )


class Leaving:
    """The engine of a worker that leaves: has decoded two tokens of each turn when it is closed."""

    def __init__(self):
        self.closing, self.begun = asyncio.Event(), asyncio.Semaphore(0)

    async def generate(self, request):
        self.begun.release()
        await self.closing.wait()
        return said(request, [50, 51], 3, FinishReason.ABORT)

    def stats(self):
        return EngineStats(generated_tokens=2, policy_version=3)

    def end_session(self, session_id):
        """Nothing is kept."""

    def abort(self, request_ids=None):
        """Nothing runs that is not ended by `close`."""


def worker(engine):
    """A rollout worker around a collector, without what else it starts."""
    made = object.__new__(RolloutWorker)
    collector = Collector(
        engine=engine,
        suite=Suite(),
        chat=Chat(),
        rollout=RolloutConfig(max_new_tokens=8),
        env=EnvConfig(),
    )
    made._collector = made._evaluator = collector
    made._engine, made._number, made._relay = engine, 4, None
    loop = asyncio.get_running_loop()
    engine.close = lambda: loop.call_soon_threadsafe(engine.closing.set)
    return made


def test_a_turn_that_had_begun_is_ended_by_another_engine_and_each_token_keeps_its_version():
    asked = []

    async def run():
        leaving = worker(Leaving())
        group = asyncio.ensure_future(leaving.collect(Prompt(instance_id="i", group_id="g"), 2))
        for _ in range(2):
            await leaving._engine.begun.acquire()
        assert await leaving.hand_over()
        while not group.done():
            turn = asyncio.ensure_future(leaving.next_turn())
            await asyncio.wait({turn, group}, return_when=asyncio.FIRST_COMPLETED)
            if turn.done():
                request = turn.result()
                asked.append(request)
                rest = [52, 53] if request.prompt_ids.tolist()[-2:] == [50, 51] else [50, 51, 52, 53]
                await leaving.turn_generated(request.request_id, said(request, rest, 7))
            turn.cancel()
        await leaving._collector.close()
        assert leaving._engine.stats() == EngineStats(generated_tokens=2, policy_version=3)
        return group.result()

    group = asyncio.run(asyncio.wait_for(run(), 30))
    for trajectory in group.trajectories:
        assert trajectory.token_ids.tolist() == [1, 2, 3, 50, 51, 52, 53, 4, 5, 50, 51, 52, 53]
        assert trajectory.versions.tolist() == [-1] * 3 + [3, 3, 7, 7] + [-1] * 2 + [7] * 4
        assert trajectory.reward == 1.0 and trajectory.num_turns == 2
    assert len({request.request_id for request in asked}) == len(asked) == 4
    assert all(request.request_id.startswith("worker 4/") and not request.session_id for request in asked)


@pytest.mark.parametrize("end", ["failed", "aborted", "cancelled"])
def test_a_turn_that_nobody_plays_ends_all_the_same(end):
    request = GenerateRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams(top_logprobs=2))

    async def run():
        away = RelayEngine(SimpleNamespace(), "worker 0")
        playing = asyncio.ensure_future(away.generate(request))
        moved = await away.next_turn()
        if end == "failed":
            away.turn_failed(moved.request_id, "no server is left")
            with pytest.raises(RuntimeError, match="another worker failed: no server is left"):
                await playing
        elif end == "aborted":
            away.abort(["another"])
            await asyncio.sleep(0)
            assert not playing.done()
            away.abort(["r"])
            assert await playing == empty_result(request, FinishReason.ABORT)
        else:
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        away.turn_generated(moved.request_id, said(moved, [1], 1))  # late: nobody asks any more
        again = asyncio.ensure_future(away.generate(request))
        assert (await away.next_turn()).request_id == moved.request_id
        away.close()
        assert (await again).output_ids.tolist() == []

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_turn_that_was_aborted_before_anybody_took_it_is_not_given_out():
    async def run():
        away = RelayEngine(SimpleNamespace(), "w")
        requests = [
            GenerateRequest(request_id=name, prompt_ids=[1], sampling=SamplingParams()) for name in "ab"
        ]
        first, second = (asyncio.ensure_future(away.generate(request)) for request in requests)
        await asyncio.sleep(0)
        away.abort(["a"])
        await first
        assert (await away.next_turn()).request_id == "w/b"
        second.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_worker_whose_engine_is_not_as_others_keeps_its_turns():
    async def run():
        leaving = worker(Leaving())
        leaving._evaluator = object()  # has a policy of its own
        before = leaving._engine
        assert not await leaving.hand_over() and leaving._engine is before
        await leaving._collector.close()

    asyncio.run(asyncio.wait_for(run(), 30))
