"""The collector against a scripted engine and a scripted environment."""

import asyncio
import gc
import re
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.envs.base import InfrastructureError, StepResult
from rlpipe.rollout.collector import Collector
from rlpipe.rollout.kv_budget import KvBudget
from rlpipe.rollout.turn import stream_seed
from rlpipe.types import FinishReason, GenerateResult, Prompt, SpecCounts, TrajectoryStatus

pytestmark = pytest.mark.unit
STOP = 0


class LetterChat:
    """One letter, one token; a prompt is [1], an observation is [2, letters, 3]."""

    stop_token_ids = (STOP,)

    def initial(self, messages, tools=None):
        names = "".join(tool["function"]["name"] for tool in tools or [])
        return [1, *map(ord, names + messages[-1]["content"])]

    def check_tools(self, tools):
        """It shows all of them."""

    def observation(self, text):
        return [{"role": "tool", "content": text}]

    def continuation(self, messages, turn_ids):
        closing = [] if turn_ids and turn_ids[-1] == STOP else [STOP]
        return [*closing, 2, *map(ord, messages[0]["content"]), 3]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i != STOP)


class ScriptedEngine:
    """Says the text of `script[turn]`; a turn's tokens, logprobs and versions are known in advance."""

    def __init__(self, script, abort_after=None):
        self.script, self.abort_after = script, abort_after
        self.requests, self.ended, self.running, self.most_running = [], [], 0, 0
        self.hold = None  # an event that generate waits for
        self.together = 0  # requests that the first ones wait for, to run at once
        self.aborts = 0

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.hold:
                await self.hold.wait()
            else:
                await asyncio.sleep(0.001)
            while self.most_running < self.together:
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        turn = request.prompt_ids.tolist().count(2)
        before = 3 if turn else ord("p")  # the token after which this turn starts
        said = request.prompt_ids.tolist()[::-1].index(before)
        rest = [*map(ord, self.script[turn]), STOP][said:]
        finish = FinishReason.STOP
        if self.abort_after and len(rest) > self.abort_after:
            rest, finish = rest[: self.abort_after], FinishReason.ABORT
        if self.hold and self.aborts:
            rest, finish = [], FinishReason.ABORT
        if len(rest) > request.sampling.max_new_tokens:
            rest, finish = rest[: request.sampling.max_new_tokens], FinishReason.LENGTH
        return GenerateResult(
            request_id=request.request_id,
            output_ids=rest,
            logprobs=[-0.5] * len(rest),
            entropies=[0.25] * len(rest),
            versions=[len(self.requests)] * len(rest),
            finish_reason=finish,
            spec=SpecCounts(drafted=[1], accepted=[1], verify_steps=1, proposed=1),
            top_logprobs=[[(i, -0.5), (7, -2.0)] for i in rest] if request.sampling.top_logprobs else None,
            routes=self.routes(request.prompt_ids.tolist() + rest, request.sampling),
            routes_from=request.sampling.routes_from,
        )

    @staticmethod
    def routes(ids, sampling):
        """Each token is read by the expert of its place."""
        if not sampling.routes:
            return None
        return np.array([*range(sampling.routes_from, len(ids) - 1), 255], np.uint8).reshape(-1, 1, 1)

    def abort(self, request_ids=None):
        self.aborts += 1
        if self.hold:
            self.hold.set()

    def end_session(self, session_id):
        self.ended.append(session_id)


@dataclass
class EchoSuite:
    """Answers an action with itself in capitals; `submit` ends with reward 1."""

    max_turns: int = 4
    fail_first: int = 0
    fail_at: str = "ls"
    episodes: list = field(default_factory=list)
    threads: set = field(default_factory=set)

    def episode(self, instance_id):
        episode = EchoEpisode(self, instance_id)
        self.episodes.append(episode)
        return episode


class EchoEpisode:
    def __init__(self, suite, instance_id):
        self.suite, self.instance_id, self.actions, self.closed = suite, instance_id, [], 0
        self.fails = len(suite.episodes) < suite.fail_first

    def messages(self):
        return [{"role": "user", "content": "p"}]

    def step(self, action):
        self.suite.threads.add(threading.current_thread().name)
        self.actions.append(action)
        if action == self.suite.fail_at and self.fails:
            raise InfrastructureError("disk full")
        if action == "submit":
            return StepResult(done=True, reward=1.0, info={"submitted": True})
        return StepResult(observation=action.upper())

    def finish(self):
        return StepResult(done=True, reward=0.0, info={"submitted": False})

    def close(self):
        self.closed += 1


def collector(
    engine,
    suite,
    *,
    retries=2,
    threads=2,
    step_timeout_s=600,
    top_logprobs=0,
    kv_budget=None,
    agents=None,
    **rollout,
):
    settings = RolloutConfig(**({"max_context": 200, "max_new_tokens": 20, "temperature": 0.7} | rollout))
    env = EnvConfig(retries=retries, threads=threads, step_timeout_s=step_timeout_s)
    parts = {"engine": engine, "suite": suite, "chat": LetterChat(), "rollout": settings, "env": env}
    return Collector(**parts, top_logprobs=top_logprobs, kv_budget=kv_budget, agents=agents)


def collect(engine, suite, group_size=1, seed=5, **settings):
    async def play():
        one = collector(engine, suite, **settings)
        try:
            return await one.collect(Prompt(instance_id="i", group_id="g", seed=seed), group_size)
        finally:
            await one.close()

    return asyncio.run(asyncio.wait_for(play(), 20))


def text(trajectory, mask):
    pairs = zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True)
    return [token for token, sampled in pairs if sampled == mask]


def test_a_trajectory_holds_prompt_turns_and_observations_in_order_with_what_was_recorded():
    engine, suite = ScriptedEngine(["ls", "submit"]), EchoSuite()
    [trajectory] = collect(engine, suite).trajectories
    p, ls, up, end = ord("p"), list(map(ord, "ls")), list(map(ord, "LS")), list(map(ord, "submit"))
    assert trajectory.token_ids.tolist() == [1, p, *ls, STOP, 2, *up, 3, *end, STOP]
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert trajectory.versions.tolist() == [-1, -1, 1, 1, 1, -1, -1, -1, -1, *[2] * 7]
    assert trajectory.rollout_logprobs.tolist() == [-0.5 * m for m in trajectory.loss_mask.tolist()]
    assert trajectory.entropies.tolist() == [0.25 * m for m in trajectory.loss_mask.tolist()]
    assert (trajectory.reward, trajectory.num_turns, trajectory.prompt_length) == (1.0, 2, 2)
    assert not trajectory.truncated and trajectory.status is TrajectoryStatus.COMPLETE
    assert trajectory.spec.verify_steps == 2
    assert trajectory.info["submitted"] and trajectory.info["exit_reason"] == "done"
    assert trajectory.info["turns"] == [
        {"role": "user", "text": "p"},
        {"action": "ls", "observation": "LS"},
        {"action": "submit", "observation": ""},
    ]
    assert suite.episodes[0].closed == 1 and engine.ended == [engine.requests[0].session_id]


def test_the_tools_of_a_suite_stand_in_the_prompt():
    suite = EchoSuite()
    suite.tools = [{"type": "function", "function": {"name": "look"}}]
    [trajectory] = collect(ScriptedEngine(["submit"]), suite).trajectories
    assert trajectory.token_ids.tolist()[: trajectory.prompt_length] == [1, *map(ord, "lookp")]


class Steps:
    """A suite of one episode whose steps return `results`, by `async def` if `is_async`; there is no more."""

    max_turns = 4

    def __init__(self, *results, is_async=False):
        self.results, self.is_async, self.started = list(results), is_async, []

    def episode(self, instance_id, seed, attempt):
        self.started.append((seed, attempt))
        return self

    def messages(self):
        return [{"role": "user", "content": "p"}]

    def step(self, action):
        result = self.results.pop(0)
        return self.later(result) if self.is_async else result

    async def later(self, result):
        await asyncio.sleep(0.001)
        if isinstance(result, BaseException):
            raise result
        return result


def test_a_text_goes_on_a_number_ends_and_rewards_of_steps_are_summed():
    engine = ScriptedEngine(["a", "b", "c"])
    suite = Steps(StepResult(observation="x", reward=0.5), "y", 2)
    [trajectory] = collect(engine, suite).trajectories
    assert (trajectory.reward, trajectory.num_turns) == (2.5, 3)
    assert trajectory.turn_rewards == [0.5, 0.0, 2.0]
    assert (
        trajectory.turn_ends
        == (1 + np.flatnonzero(np.diff([*trajectory.loss_mask.astype(int), 0]) < 0)).tolist()
    )
    assert trajectory.info["exit_reason"] == "done" and not trajectory.truncated


def test_an_episode_without_finish_ends_with_the_rewards_of_its_steps():
    suite = Steps(StepResult(observation="x", reward=0.5), StepResult(observation="y", reward=0.25))
    suite.max_turns = 2
    [trajectory] = collect(ScriptedEngine(["a", "b"]), suite).trajectories
    assert (trajectory.reward, trajectory.info["exit_reason"]) == (0.75, "max_turns")
    assert trajectory.turn_rewards == [0.5, 0.25]
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.truncated


def test_a_truncated_episode_is_counted_and_trained():
    suite = Steps(StepResult(truncated=True, reward=0.5))
    [trajectory] = collect(ScriptedEngine(["a"]), suite).trajectories
    assert (trajectory.reward, trajectory.truncated) == (0.5, True)
    assert trajectory.status is TrajectoryStatus.COMPLETE
    assert trajectory.info["exit_reason"] == "truncated"


def test_each_attempt_has_a_seed_of_its_own_that_a_repetition_has_too():
    started = []
    for _ in range(2):
        suite = Steps(*[1.0] * 3)
        collect(ScriptedEngine(["a"]), suite, group_size=3)
        started.append(sorted(suite.started, key=lambda pair: pair[1]))
    assert started[0] == started[1]
    assert [number for _, number in started[0]] == [0, 1, 2]
    assert len({seed for seed, _ in started[0]}) == 3


def test_async_steps_are_awaited_and_their_errors_are_the_environments():
    suite = Steps("x", 1.0, is_async=True)
    [trajectory] = collect(ScriptedEngine(["a", "b"]), suite).trajectories
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 2)
    assert trajectory.info["sandbox_seconds"] > 0.001

    for error in (KeyError("k"), SystemExit(3), asyncio.CancelledError(), StopAsyncIteration()):
        [trajectory] = collect(ScriptedEngine(["a"]), Steps(error, is_async=True)).trajectories
        assert trajectory.info["exit_reason"] == "error" and type(error).__name__ in trajectory.info["error"]
        assert "test_collector.py" in trajectory.info["place"]

    [trajectory] = collect(
        ScriptedEngine(["a"]), Steps(*[InfrastructureError("down")] * 3, is_async=True)
    ).trajectories
    assert (trajectory.info["exit_reason"], trajectory.info["retries"]) == ("infrastructure", 2)


class Agents:
    """An endpoint whose sessions have these turns once they are closed."""

    def __init__(self, turns):
        self.turns = turns

    async def open(self, attempt):
        async def close():
            session.turns = self.turns

        session = SimpleNamespace(close=close, turns=[], texts=["yes"], limit="", cut=False, failure=None)
        session.address = None
        return session


@pytest.mark.parametrize("fails", [False, True])
def test_the_record_of_an_agent_has_all_messages_even_if_the_agent_fails(fails):
    turns = [{"role": "user", "text": "p" * 3000}, {"action": "yes"}]

    class Agent(Steps):
        def run_agent(self, address):
            if fails:
                raise KeyError("answer")

    [trajectory] = collect(ScriptedEngine([]), Agent(1.0), agents=Agents(turns)).trajectories
    assert (trajectory.status is TrajectoryStatus.MASKED) == fails
    assert trajectory.info["turns"] == [{"role": "user", "text": "p" * 2000}, {"action": "yes"}]


class Compared(Steps):
    """Siblings whose final rewards are what `judge` makes of them."""

    def __init__(self, judge):
        super().__init__(*[1.0, 2.0, 3.0])
        self.judge, self.seen = judge, []

    def score_group(self, instance_id, results):
        self.seen.append((instance_id, results))
        return self.judge(results)


def test_a_reward_that_sees_the_siblings_replaces_theirs_and_counts_in_the_last_turn():
    suite = Compared(lambda results: [r.reward - min(o.reward for o in results) for r in results])
    trajectories = collect(ScriptedEngine(["a"]), suite, group_size=3).trajectories
    assert sorted(t.reward for t in trajectories) == [0.0, 1.0, 2.0]
    assert [t.turn_rewards for t in trajectories] == [[t.reward] for t in trajectories]
    [(instance, results)] = suite.seen
    assert instance == "i" and [r.text for r in results] == ["a"] * 3 and results[0].turns == ["a"]


def test_what_a_reward_that_sees_the_siblings_adds_to_their_info_is_recorded():
    def judge(results):
        for rank, result in enumerate(results):
            result.info["rank"] = rank
        return [0.0] * len(results)

    trajectories = collect(ScriptedEngine(["a"]), Compared(judge), group_size=3).trajectories
    assert [t.info["rank"] for t in trajectories] == [0, 1, 2]


@pytest.mark.parametrize(
    ("judge", "reason", "says", "calls"),
    [
        (lambda results: [1.0], "error", "score_group() returned [1.0] (list) for 3 results", 1),
        (lambda results: [float("nan")] * 3, "error", "score_group()[0]=nan", 1),
        (lambda results: {}["judge"], "error", "KeyError: 'judge'", 1),
        (lambda results: (_ for _ in ()).throw(InfrastructureError("down")), "infrastructure", "down", 3),
    ],
)
def test_a_failure_of_a_reward_that_sees_the_siblings_masks_the_group(judge, reason, says, calls):
    suite = Compared(judge)
    for trajectory in collect(ScriptedEngine(["a"]), suite, group_size=3).trajectories:
        assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.MASKED, None)
        assert trajectory.info["exit_reason"] == reason and says in trajectory.info["error"]
    assert len(suite.seen) == calls


def test_an_async_step_that_never_yields_does_not_hold_the_loop_of_the_engine():
    release = threading.Event()

    class Blocking(Steps):
        async def later(self, result):
            release.wait(10)
            return result

    async def play():
        one = collector(ScriptedEngine(["a"]), Blocking(1.0, is_async=True))
        task = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 1))
        for _ in range(20):  # would not return from the first one
            await asyncio.sleep(0.001)
        assert not task.done()
        release.set()
        group = await task
        await one.close()
        return group

    assert asyncio.run(asyncio.wait_for(play(), 10)).trajectories[0].reward == 1.0


@pytest.mark.parametrize("abort_after", [None, 3])
def test_candidates_come_with_every_sampled_token_across_turns_and_aborts(abort_after):
    engine = ScriptedEngine(["abcdefgh", "submit"], abort_after)
    [trajectory] = collect(engine, EchoSuite(), top_logprobs=2).trajectories
    assert {request.sampling.top_logprobs for request in engine.requests} == {2}
    assert trajectory.top_logprobs == [
        [(token, -0.5), (7, -2.0)] if sampled else []
        for token, sampled in zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True)
    ]


@pytest.mark.parametrize("abort_after", [None, 3])
def test_each_request_asks_for_the_experts_of_the_tokens_without_a_record(abort_after):
    engine = ScriptedEngine(["abcdefgh", "submit"], abort_after)
    [trajectory] = collect(engine, EchoSuite(), replay_routes=True).trajectories
    assert len(engine.requests) == (6 if abort_after else 2)
    length = 0
    for request in engine.requests:
        assert request.sampling.routes_from == max(length - 1, 0)
        length = len(request.prompt_ids) + (abort_after or len("abcdefgh") + 1)
    expected = [*range(len(trajectory.token_ids) - 1), 255]
    assert trajectory.routes.ravel().tolist() == expected


def test_an_evaluation_asks_for_no_candidates():
    engine = ScriptedEngine(["submit"])

    async def play():
        one = collector(engine, EchoSuite(), top_logprobs=2)
        try:
            return await one.evaluate(["i"], 1, 1.0)
        finally:
            await one.close()

    [trajectory] = asyncio.run(asyncio.wait_for(play(), 20))
    assert engine.requests[0].sampling.top_logprobs == 0 and trajectory.top_logprobs is None


def test_siblings_run_at_once_with_streams_of_their_own_that_a_second_run_repeats():
    first, second, other = (ScriptedEngine(["ls", "submit"]) for _ in range(3))
    first.together = 4
    group = collect(first, EchoSuite(), group_size=4)
    collect(second, EchoSuite(), group_size=4)
    collect(other, EchoSuite(), group_size=4, seed=6)
    seeds = [r.sampling.seed for r in first.requests]
    assert first.most_running == 4
    assert len(set(seeds)) == 8
    assert sorted(seeds) == sorted(r.sampling.seed for r in second.requests)
    assert not set(seeds) & {r.sampling.seed for r in other.requests}
    assert len({t.trajectory_id for t in group.trajectories}) == 4
    assert len({r.session_id for r in first.requests}) == 4
    assert {r.sampling.temperature for r in first.requests} == {0.7}


def test_turn_limit_finishes_the_episode_and_marks_the_trajectory_truncated():
    engine, suite = ScriptedEngine(["ls"] * 9), EchoSuite(max_turns=3)
    [trajectory] = collect(engine, suite).trajectories
    assert (trajectory.num_turns, trajectory.reward, trajectory.truncated) == (3, 0.0, True)
    assert trajectory.info["exit_reason"] == "max_turns" and not trajectory.info["submitted"]
    assert trajectory.loss_mask[-1] == 1, "no observation follows the last turn"


def test_context_limit_is_never_exceeded_and_ends_the_trajectory():
    engine, suite = ScriptedEngine(["longword"] * 9), EchoSuite(max_turns=9)
    [trajectory] = collect(engine, suite, max_context=30).trajectories
    assert trajectory.truncated and trajectory.info["exit_reason"] == "context"
    assert len(trajectory.token_ids) <= 30
    assert all(len(r.prompt_ids) + r.sampling.max_new_tokens <= 30 for r in engine.requests)


def test_a_prompt_that_does_not_fit_is_masked_not_punished_and_says_which_setting():
    suite = EchoSuite()
    [trajectory] = collect(ScriptedEngine(["ls"]), suite, max_context=2).trajectories
    assert trajectory.status is TrajectoryStatus.MASKED and trajectory.reward is None
    assert trajectory.info["exit_reason"] == "prompt" and trajectory.info["retries"] == 0
    assert "2 tokens: raise rollout.max_context=2" in trajectory.info["error"]
    assert suite.episodes[0].closed == 1


def test_a_turn_cut_by_length_is_played_and_closed_before_the_observation():
    engine, suite = ScriptedEngine(["abcdef", "ls"]), EchoSuite(max_turns=2)
    [trajectory] = collect(engine, suite, max_new_tokens=3).trajectories
    assert suite.episodes[0].actions[0] == "abc"
    assert trajectory.token_ids.tolist()[2:7] == [*map(ord, "abc"), STOP, 2]
    assert trajectory.loss_mask.tolist()[2:7] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("script", "settings", "truncated"),
    [
        (["submit"], {"max_new_tokens": 7}, False),  # the last token of the budget is the stop token
        (["submit"], {"max_new_tokens": 6}, True),  # the episode ends well on an answer without it
        (["abcdef", "submit"], {"max_new_tokens": 7}, False),
        (["abcdefgh", "submit"], {"max_new_tokens": 7}, True),  # a turn before the last
        (["abcdefgh", "submit"], {"max_new_tokens": 7, "abort_after": 2}, True),
        (["submit"], {"abort_after": 2}, False),
    ],
)
def test_a_trajectory_is_truncated_when_any_turn_was_cut_by_its_token_limit(script, settings, truncated):
    engine = ScriptedEngine(script, abort_after=settings.pop("abort_after", None))
    [trajectory] = collect(engine, EchoSuite(), **settings).trajectories
    assert trajectory.truncated == truncated
    assert trajectory.info["exit_reason"] == "done" and trajectory.reward == 1.0


def test_an_aborted_turn_is_continued_from_what_exists_within_its_budget():
    whole = collect(ScriptedEngine(["abcdefgh", "submit"]), EchoSuite()).trajectories[0]
    engine = ScriptedEngine(["abcdefgh", "submit"], abort_after=3)
    [trajectory] = collect(engine, EchoSuite()).trajectories
    assert (
        trajectory.token_ids.tolist() == whole.token_ids.tolist()
        and trajectory.loss_mask.tolist() == whole.loss_mask.tolist()
    )
    assert trajectory.num_turns == 2
    assert trajectory.versions.tolist()[2:11] == [1, 1, 1, 2, 2, 2, 3, 3, 3], (
        "each part keeps its own version"
    )
    assert [r.sampling.max_new_tokens for r in engine.requests[:3]] == [20, 17, 14]
    assert len({r.sampling.seed for r in engine.requests}) == len(engine.requests)
    assert trajectory.spec.verify_steps == len(engine.requests)


def test_an_infrastructure_failure_replays_the_whole_trajectory_with_the_same_seeds():
    engine, suite = ScriptedEngine(["ls", "submit"]), EchoSuite(fail_first=1)
    [trajectory] = collect(engine, suite).trajectories
    assert trajectory.reward == 1.0 and trajectory.info["retries"] == 1
    assert trajectory.num_turns == 2, "nothing of the failed attempt is kept"
    assert engine.requests[0].sampling.seed == engine.requests[1].sampling.seed
    assert engine.requests[0].session_id != engine.requests[1].session_id
    assert [episode.closed for episode in suite.episodes] == [1, 1]


def test_when_retries_are_used_up_the_trajectory_is_masked_and_says_why():
    engine, suite = ScriptedEngine(["ls", "submit"]), EchoSuite(fail_first=9)
    [trajectory] = collect(engine, suite, retries=2).trajectories
    assert trajectory.status is TrajectoryStatus.MASKED and trajectory.reward is None
    assert trajectory.info["error"] == "disk full" and trajectory.info["retries"] == 2
    assert trajectory.info["exit_reason"] == "infrastructure"
    assert len(suite.episodes) == 3 and len(engine.ended) == 3


def test_one_masked_sibling_leaves_the_others_alone():
    suite = EchoSuite(fail_first=1)
    group = collect(ScriptedEngine(["ls", "submit"]), suite, group_size=3, retries=0)
    assert sorted(str(t.status) for t in group.trajectories) == ["complete", "complete", "masked"]


class Hostile(EchoSuite):
    """Episodes one of whose methods is replaced."""

    def __init__(self, method, behave):
        super().__init__()
        self.method, self.behave = method, behave

    def episode(self, instance_id):
        if self.method == "episode":
            self.behave()
        episode = super().episode(instance_id)
        setattr(episode, self.method, lambda *args: self.behave())
        return episode


def raising(error):
    def behave():
        raise error

    return behave


def ending(reward, **info):
    return lambda: StepResult(done=True, reward=reward, info=info)


@pytest.mark.parametrize(
    ("method", "behave", "says"),
    [
        ("episode", raising(KeyError("i")), "KeyError: 'i'"),
        ("messages", lambda: [{"role": "user", "content": None}], "'content': None} (dict): return {'role'"),
        ("step", raising(ValueError("no report")), "ValueError: no report"),
        ("step", raising(SystemExit(3)), "SystemExit: 3"),
        ("step", raising(StopIteration()), "StopIteration"),
        ("step", raising(asyncio.CancelledError()), "CancelledError"),
        ("step", raising(RecursionError("deep")), "RecursionError: deep"),
        ("step", lambda: None, "step() returned None (NoneType): return an observation"),
        ("step", lambda: StepResult(observation=7), "observation=7 (int): give a string"),
        ("step", ending(float("nan")), "reward=nan (float), which would make every weight it trains NaN"),
        ("step", ending(float("inf")), "reward=inf"),
        ("step", ending(None), "reward=None (NoneType): give a finite number"),
        ("step", ending("1.0"), "reward='1.0' (str): give a finite number"),
        ("step", ending(1.0, lock=threading.Lock()), "info['lock']="),
        ("close", raising(OSError("busy")), "OSError: busy"),
    ],
)
def test_whatever_an_environment_does_ends_in_that_attempt_without_a_reward(method, behave, says):
    engine, suite = ScriptedEngine(["submit"]), Hostile(method, behave)
    for trajectory in collect(engine, suite, group_size=2, max_new_tokens=9).trajectories:
        assert trajectory.status is TrajectoryStatus.MASKED and trajectory.reward is None
        assert trajectory.info["exit_reason"] == "error" and trajectory.info["retries"] == 0
        assert says in trajectory.info["error"]
        assert re.fullmatch(r"/.*\.py:\d+", trajectory.info["place"])
    if behave.__qualname__.startswith("raising"):
        assert "test_collector.py" in trajectory.info["place"]


def test_attempts_start_only_while_the_engine_can_store_their_conversations():
    """The first attempt shows a length of 16 tokens; one fits into the row and two into the rest."""
    engine, suite = ScriptedEngine(["ls", "submit"]), EchoSuite()
    budget = KvBudget(rows=1, tokens=32)

    async def play():
        one = collector(engine, suite, kv_budget=budget)
        try:
            (first,) = (await one.collect(Prompt(instance_id="i", group_id="g", seed=5), 1)).trajectories
            assert len(first.token_ids) == 16
            return await one.collect(Prompt(instance_id="i", group_id="h", seed=6), 8)
        finally:
            await one.close()

    group = asyncio.run(asyncio.wait_for(play(), 20))
    assert [one.reward for one in group.trajectories] == [1.0] * 8
    assert engine.most_running == 3 and budget.waiting == 0


def test_a_failing_engine_is_not_an_attempt_that_failed():
    class Dead(ScriptedEngine):
        async def generate(self, request):
            raise ConnectionError("no server")

    with pytest.raises(ConnectionError):
        collect(Dead([]), EchoSuite(), group_size=2)


def test_environments_run_in_the_configured_number_of_threads():
    suite = EchoSuite()
    collect(ScriptedEngine(["ls", "submit"]), suite, group_size=6, threads=1)
    assert len(suite.threads) == 1 and threading.current_thread().name not in suite.threads


def test_group_seconds_are_means_over_its_trajectories():
    group = collect(ScriptedEngine(["ls", "submit"]), EchoSuite(), group_size=4)
    assert 0.002 <= group.gen_seconds < 1 and 0 < group.env_seconds < 1


def test_evaluation_bounds_what_runs_at_once_keeps_order_and_repeats():
    def evaluate():
        engine = ScriptedEngine(["ls", "submit"])
        engine.together = 3  # also where the machine is busy

        async def play():
            one = collector(engine, EchoSuite(), max_running=3)
            return await one.evaluate([f"i{n}" for n in range(5)], 2, 0.0)

        return engine, asyncio.run(play())

    engine, played = evaluate()
    assert [t.instance_id for t in played] == [f"i{n}" for n in range(5) for _ in range(2)]
    assert engine.most_running == 3 and {r.sampling.temperature for r in engine.requests} == {0.0}
    seeds = sorted(r.sampling.seed for r in engine.requests)
    assert len(set(seeds)) == 20 and seeds == sorted(r.sampling.seed for r in evaluate()[0].requests)


def test_closing_ends_running_trajectories_as_masked():
    async def play():
        engine, suite = ScriptedEngine(["ls", "submit"]), EchoSuite()
        engine.hold = asyncio.Event()
        one = collector(engine, suite)
        running = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 2))
        while engine.running < 2:
            await asyncio.sleep(0.001)
        await one.close()
        return await running, suite

    group, suite = asyncio.run(asyncio.wait_for(play(), 10))
    assert [t.status for t in group.trajectories] == [TrajectoryStatus.MASKED] * 2
    assert {t.info["exit_reason"] for t in group.trajectories} == {"closed"}
    assert all(episode.closed for episode in suite.episodes)


def test_cancelling_aborts_the_running_requests():
    async def play():
        engine = ScriptedEngine(["ls"])
        engine.hold = asyncio.Event()
        one = collector(engine, EchoSuite())
        running = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 2))
        while engine.running < 2:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return engine

    engine = asyncio.run(asyncio.wait_for(play(), 10))
    assert engine.aborts == 2 and engine.running == 0 and len(engine.ended) == 2


def test_an_environment_that_fails_to_close_behind_a_cancelled_attempt_is_not_reported_by_asyncio():
    closing, reported, go_on = threading.Event(), [], threading.Event()

    class FailsToClose(EchoEpisode):
        def close(self):
            closing.set()
            go_on.wait(10)
            raise PermissionError("scratch")

    async def play():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        suite = EchoSuite()
        suite.episode = lambda instance_id: FailsToClose(suite, instance_id)
        one = collector(ScriptedEngine(["submit"]), suite)
        running = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 1))
        await asyncio.to_thread(closing.wait, 10)

        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        go_on.set()
        await one.close()
        await asyncio.sleep(0.05)  # the thread's answer arrives
        gc.collect()

    asyncio.run(asyncio.wait_for(play(), 20))
    assert closing.is_set() and reported == []


def test_an_agent_that_fails_because_it_was_cancelled_is_not_reported_by_asyncio(caplog):
    running = threading.Event()

    class Agent(Steps):
        async def run_agent(self, address):
            try:
                running.set()
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("the sandbox was ended")

    async def play():
        suite = Agent()
        one = collector(ScriptedEngine([]), suite, agents=Agents([]))
        attempt = asyncio.create_task(one.collect(Prompt(instance_id="i", group_id="g"), 1))
        await asyncio.to_thread(running.wait, 10)

        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await one.close()

    asyncio.run(asyncio.wait_for(play(), 20))
    gc.collect()
    assert running.is_set() and [record.getMessage() for record in caplog.records] == []


def test_stream_seeds_are_stable_across_processes_and_versions():
    assert stream_seed(5, 0) == 5716519417124086793
    assert 0 <= stream_seed("eval", "x", 1) < 2**63
