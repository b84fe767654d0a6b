"""Calls of an environment that hang: named, limited, replaced, and never in the way of the end."""

import asyncio
import inspect
import pickle
import threading
import time

import pytest

from rlpipe.envs.base import StepResult
from rlpipe.rollout import environment_threads
from rlpipe.rollout.environment_threads import EnvironmentHung, EnvironmentThreads
from rlpipe.types import Prompt, RunStopped, TrajectoryStatus
from tests.unit.rollout.test_collector import EchoSuite, ScriptedEngine, collect, collector

pytestmark = pytest.mark.unit


@pytest.fixture
def freed():
    """An event that hanging calls wait for; set at the end, so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()


def line_of(function, text):
    """Line number of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def hangs_in_c(freed):
    freed.wait()


def hangs_in_python(freed):
    while not freed.is_set():
        pass


def hangs_in_a_coroutine(freed):
    async def inner():
        while not freed.is_set():
            await asyncio.sleep(0.02)

    async def outer():
        await inner()

    asyncio.run(outer())


@pytest.mark.parametrize(
    ("hangs", "at"),
    [
        (hangs_in_c, "freed.wait()"),
        (hangs_in_python, "while not"),
        (hangs_in_a_coroutine, "await asyncio.sleep"),
    ],
)
def test_a_call_that_hangs_is_named_by_the_line_it_is_in(freed, hangs, at):
    async def play():
        threads = EnvironmentThreads(1, 0.1)
        with pytest.raises(
            EnvironmentHung, match=r"step\(\) did not return within env.step_timeout_s=0.1"
        ) as e:
            await threads.call(lambda: hangs(freed), "step")
        return e.value

    hung = run(play())
    assert str(hung).startswith("step() did not return within env.step_timeout_s=0.1 s; it was at /")
    file, _, line = hung.place.rpartition(":")
    assert file == __file__
    assert int(line) in {line_of(hangs, at), line_of(hangs, at) + (hangs is hangs_in_python)}
    copy = pickle.loads(pickle.dumps(hung))
    assert (copy.place, str(copy)) == (hung.place, str(hung)), "Ray's workers send it"


def test_another_thread_takes_the_place_of_one_that_hangs_and_a_call_in_time_returns(freed):
    async def play():
        threads = EnvironmentThreads(1, 0.1)
        hung = asyncio.ensure_future(threads.call(freed.wait, "step"))
        await asyncio.sleep(0)  # it takes the only thread
        names = [await threads.call(lambda: threading.current_thread().name, "step") for _ in range(3)]
        return names, isinstance(hung.exception(), EnvironmentHung)

    assert run(play()) == (["env_1"] * 3, True)


def test_too_many_stuck_threads_end_the_run_and_those_that_return_do_not_count(freed, monkeypatch):
    monkeypatch.setattr(environment_threads, "MAX_STUCK", 1)

    async def play():
        threads, brief = EnvironmentThreads(1, 0.05), threading.Event()
        for _ in range(3):
            with pytest.raises(EnvironmentHung):
                await threads.call(brief.wait, "step")
            brief.set()
            await asyncio.sleep(0.05)
            brief.clear()
        with pytest.raises(EnvironmentHung):
            await threads.call(lambda: hangs_in_c(freed), "step")
        with pytest.raises(RunStopped, match=rf"2 threads .* it was at {__file__}:\d+ `freed.wait\(\)`"):
            await threads.call(lambda: hangs_in_c(freed), "step")

    run(play())


def test_the_longest_call_is_known_with_its_line_and_none_when_all_have_returned(freed):
    async def play():
        threads = EnvironmentThreads(2)
        before = threads.busiest()
        waiting = asyncio.ensure_future(threads.call(lambda: hangs_in_c(freed), "step"))
        await asyncio.sleep(0.05)
        later = asyncio.ensure_future(threads.call(freed.wait, "close"))
        await asyncio.sleep(0.01)
        during = threads.busiest()
        freed.set()
        await asyncio.gather(waiting, later)
        return before, during, threads.busiest()

    before, (work, seconds), after = run(play())
    assert before is after is None
    assert work == f"step() at {__file__}:{line_of(hangs_in_c, 'wait')} `freed.wait()`"
    assert 0.05 <= seconds < 5


class Hanging(EchoSuite):
    """Its first episode hangs in one method until `freed` is set."""

    def __init__(self, freed, method, *, times=1):
        super().__init__()
        self.freed, self.method, self.times = freed, method, times

    def episode(self, instance_id):
        episode = super().episode(instance_id)
        if len(self.episodes) <= self.times:
            setattr(episode, self.method, lambda *_: self.freed.wait() and StepResult(done=True, reward=0.0))
        return episode


@pytest.mark.parametrize("method", ["messages", "step", "close"])
def test_an_attempt_whose_call_hangs_is_repeated_and_its_episode_closed(freed, method):
    suite = Hanging(freed, method)
    [trajectory] = collect(ScriptedEngine(["submit"]), suite, step_timeout_s=0.5).trajectories
    assert (trajectory.reward, trajectory.info["retries"]) == (1.0, 1)
    assert [episode.closed for episode in suite.episodes] == [method != "close", 1]


def test_an_attempt_that_hangs_each_time_is_masked_with_file_and_line_and_no_reward(freed):
    suite = Hanging(freed, "step", times=9)
    [trajectory] = collect(ScriptedEngine(["submit"]), suite, retries=1, step_timeout_s=0.5).trajectories
    assert trajectory.status is TrajectoryStatus.MASKED and trajectory.reward is None
    assert trajectory.info["exit_reason"] == "infrastructure" and trajectory.info["retries"] == 1
    assert trajectory.info["place"] == f"{__file__}:{line_of(Hanging.episode, 'self.freed.wait()')}"
    assert "() did not return within env.step_timeout_s=0.5 s" in trajectory.info["error"]


def test_a_step_that_never_returns_keeps_neither_a_cancelled_attempt_nor_the_end(freed, monkeypatch):
    monkeypatch.setattr("rlpipe.rollout.collector._CLOSE_S", 0.1)

    async def play():
        suite = Hanging(freed, "step", times=9)
        one = collector(ScriptedEngine(["submit"]), suite)
        running = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 4))
        while len(suite.episodes) < 4:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await one.close()
        return running.cancelled()

    started = time.monotonic()
    assert run(play())
    assert time.monotonic() - started < 2
