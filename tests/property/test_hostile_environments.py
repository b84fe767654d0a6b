"""A hundred seeded runs of the real controller and collector on an environment that is odd at random.

Rewards are what the readers of both graders, of trees and of images, make of reports that are malformed at
random: those count as 0 passed, and never as a failure. Every run ends as its rule says: all steps trained,
or stopped by `run.max_masked_share` with a checkpoint of the last step; and the ledger is exact.
"""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import Config, RunSettings, ValConfig
from rlpipe.envs.base import InfrastructureError, StepResult
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.swe.grader import images, trees
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.controller import Controller
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.jsonl import MetricsFile, read_jsonl
from rlpipe.rollout.collector import Collector
from rlpipe.types import FinishReason, GenerateResult, RunStopped, SpecCounts

pytestmark = pytest.mark.property
STEPS, WINDOW, SHARE = 4, 16, 0.5


class Chat:
    """Every text is one token."""

    stop_token_ids = (0,)

    def initial(self, messages, tools=None):
        return [1, *[2 for m in messages if m["content"] + ""]]

    def observation(self, text):
        return [{"role": "tool", "content": text}]

    def continuation(self, messages, turn_ids):
        return [3, *[2 for m in messages if m["content"] + ""]]

    def decode(self, ids):
        return "text"

    def token_texts(self, ids):
        return ["x"] * len(ids)


class Engine:
    """Says two tokens at the version it serves."""

    version = 0

    async def generate(self, request):
        await asyncio.sleep(0)
        return GenerateResult(
            request_id=request.request_id,
            output_ids=[5, 0],
            logprobs=[-1.0, -1.0],
            entropies=[1.0, 1.0],
            versions=[self.version] * 2,
            finish_reason=FinishReason.STOP,
            spec=SpecCounts(),
        )

    def abort(self, request_ids=None):
        """Nothing runs for long."""

    def end_session(self, session_id):
        """Nothing is held."""


class Odd:
    """An environment that does something odd with probability `rate` at every call."""

    max_turns = 3

    def __init__(self, seed: int, rate: float) -> None:
        self.luck, self.rate, self.lock = random.Random(seed), rate, threading.Lock()
        self.reports: list[tuple[bool, int]] = []  # (malformed, tests that passed by it)

    def draw(self, *odd):
        """One of `odd`, or None. A function is called."""
        with self.lock:
            what = self.luck.choice(odd) if self.luck.random() < self.rate else None
        return what

    def episode(self, instance_id):
        misbehave(self.draw(KeyError("report"), OSError(28, "No space left on device")))
        return OddEpisode(self)


NONCE = "f" * 32
LINES = [
    *("", "{}", "null", "[]", "x", "[" * 100_000, "9" * 5000, '{"passed": 1}', '{"passed": [["a"]]}'),
    *('{"passed": {"a": 1}, "intact": true}', '{"passed": ["b"], "intact": true}', '"\\ud800"', "\x00"),
    *(
        '{"passed": ["a"], "intact": false}',
        '{"passed": ["a"], "intact": 1}',
        '{"passed": ["a"], "exit_code": 1}',
    ),
]


def graded(luck, malformed):
    """How many of the one test "a" pass by a report of a random grader, which is well-formed or not."""
    tree = luck.random() < 0.5
    text = '{"passed": ["a"], "intact": true}' if tree else '{"passed": ["a"], "exit_code": 0}'
    mark = NONCE if tree else images._signature(NONCE, text.encode()).decode()
    code, exceeded = 0, None
    if malformed:
        code, exceeded, mark, text = luck.choice(
            [
                (0, Limit.TIME, mark, text),
                (int(tree), Limit.OUTPUT, mark, text),
                (0, None, f"e{mark}", text),
                (0, None, mark, text[:-2]),
                (0, None, mark, luck.choice(LINES)),
            ]
        )
    result = CommandResult(output=f"noise\n{mark}{text}\n", exit_code=code, exceeded=exceeded)
    if tree:
        return trees.passed_tests(result, NONCE, ("a",))
    names, status = images.reported(result, NONCE)
    return int(status == 0 and "a" in names)


def misbehave(what):
    if isinstance(what, BaseException):
        raise what


class OddEpisode:
    def __init__(self, suite):
        self.suite = suite

    def messages(self):
        return self.suite.draw([], [{"role": "user"}], None) or [{"role": "user", "content": "p"}]

    def step(self, action):
        errors = [
            *(KeyError("passed"), ValueError("Expecting value: line 1"), TypeError("not a dict")),
            *(SystemExit(1), StopIteration(), asyncio.CancelledError(), RecursionError(), MemoryError()),
            *(
                InfrastructureError("scratch is full"),
                UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
            ),
        ]
        misbehave(self.suite.draw(*errors))
        odd = self.suite.draw(
            StepResult(done=True, reward=float("nan")),
            StepResult(done=True, reward=None),
            StepResult(done=True, reward=10**400),
            StepResult(done=True, reward=1.0, info={"submitted": "no", "retries": "x", "text": "\ud800"}),
            StepResult(done=True, reward=1.0, info={1: threading.Lock()}),
            StepResult(observation=b"bytes"),
            "done",
        )
        with self.suite.lock:
            luck = self.suite.luck
            malformed = luck.random() < self.suite.rate
            passed = graded(luck, malformed)
            self.suite.reports.append((malformed, passed))
            reward = float(passed and luck.random() < 0.5)
        return odd or StepResult(done=True, reward=reward, info={"submitted": True})

    def finish(self):
        misbehave(self.suite.draw(ValueError("no tests")))
        return StepResult(done=True, reward=0.0)

    def close(self):
        misbehave(self.suite.draw(PermissionError("scratch")))


class FakeCluster:
    """The real collector, and a trainer that counts."""

    def __init__(self, suite) -> None:
        self.engine = Engine()
        self.collector = Collector(
            engine=self.engine,
            suite=suite,
            chat=Chat(),
            rollout=RolloutConfig(max_context=64, max_new_tokens=8),
            env=EnvConfig(threads=2, retries=1),
        )
        self.trained: list[int] = []

    async def collect(self, prompt, group_size):
        return await self.collector.collect(prompt, group_size)

    async def train_step(self, groups):
        self.trained.append(sum(t.reward is not None for g in groups for t in g.trajectories))
        return {}

    async def probe(self, trajectories):
        return []

    async def publish_weights(self, version):
        async def send():
            self.engine.version = version
            return {}

        return send

    async def save(self, directory):
        async def write():
            (directory / "weights").write_text("x")

        return write

    async def rollout_metrics(self):
        return {}


async def play(run, cluster):
    try:
        await asyncio.wait_for(run.run(), 60)
    except RunStopped as verdict:
        return str(verdict)
    finally:
        await cluster.collector.close()


@pytest.mark.parametrize("seed", range(100))
def test_a_run_ends_as_its_rule_says_whatever_the_environment_does(tmp_path, seed):
    luck = random.Random(seed)
    rate = luck.choice([0.02, 0.1, 0.3, 1.0])
    config = Config(
        run=RunSettings(
            dir=str(tmp_path), steps=STEPS, save_every=1, max_masked_share=SHARE, masked_window=WINDOW
        ),
        pipeline=PipelineConfig(
            prompts_per_step=3,
            group_size=2,
            max_staleness=luck.choice([0, 1, 2]),
            stale=luck.choice(list(Stale)[:2]),
        ),
        val=ValConfig(every=0),
    )
    suite = Odd(seed, rate)
    cluster = FakeCluster(suite)
    bus = MetricsBus([MetricsFile(tmp_path / "metrics.jsonl")], events=tmp_path / "events.jsonl")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    run = Controller(
        config=config,
        run_dir=tmp_path,
        cluster=cluster,
        prompts=PromptStream([f"i{n}" for n in range(50)], seed=seed),
        held_out={},
        bus=bus,
        ledger=ledger,
        checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=2),
    )
    verdict = asyncio.run(play(run, cluster))
    bus.close()
    events, broken = read_jsonl(tmp_path / "events.jsonl")
    masked = ledger._db.execute("SELECT COUNT(*) FROM trajectories WHERE state = 'masked'").fetchone()[0]

    assert [r for r in suite.reports if r[0] == bool(r[1])] == []
    assert ledger.violations(ended=verdict is None) == [] and broken == 0
    assert all(count > 0 for count in cluster.trained), "a step trained on nothing"
    assert [s for s in run.checkpoints.steps() if s] == [s for s in (run.version - 1, run.version) if s > 0]
    assert bool(masked) == any(e["kind"] == "attempt_masked" for e in events)
    if verdict is None:
        assert run.version == STEPS == len(cluster.trained)
    else:
        assert "of the last 16 attempts were masked (run.max_masked_share=0.5)" in verdict
        assert any(e["kind"] == "run_stopped" and e["reason"] == verdict for e in events)
        assert masked >= SHARE * WINDOW
    if rate == 1.0:
        assert verdict and run.version == 0
    if rate == 0.02:
        assert verdict is None
