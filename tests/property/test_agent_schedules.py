"""Agents' sessions under faults: what is trained is what the engine sampled for them; each prompt ends once.

Real collector, sessions and ledger over a played engine, in virtual time and one thread. A schedule of a seed
has clients that ask in parallel, edit their history, leave in the middle of a request or fail; weights that
are updated in the middle of requests; workers that are killed with all their sessions; a disk that is full.
"""

import asyncio
import itertools
import random
from collections import Counter

import numpy as np
import pytest

from rlpipe.config.env import EnvConfig, ToolParser
from rlpipe.config.rollout import RolloutConfig
from rlpipe.envs.base import AgentAddress, StepResult
from rlpipe.loop.ledger import Ledger
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector, gather_or_cancel
from rlpipe.serve.requests import ChatRequest
from rlpipe.serve.session import Session
from rlpipe.types import FinishReason, GenerateResult, Prompt, SpecCounts, TrajectoryStatus
from tests.helpers.agents import templates, tokenizer_for
from tests.helpers.virtual_time import VirtualLoop

pytestmark = pytest.mark.property
SEEDS, SIBLINGS = 200, 2


class WorkerDied(Exception):
    """All that a killed worker was asked for."""


class Inline:
    """Calls of the environment, in the loop of the test."""

    async def call(self, function, name):
        return function()

    async def result_of(self, awaitable, name):
        return await awaitable

    async def close(self, timeout_s):
        pass


class Engine:
    """Takes its time; an update of weights aborts what runs, a kill fails it. mixes: a planted fault."""

    def __init__(self, world):
        self.world, self.running, self.mixes = world, set(), False

    async def generate(self, request):
        world, ended = self.world, asyncio.get_running_loop().create_future()
        version = world.version
        self.running.add(ended)
        try:
            await asyncio.wait({ended}, timeout=world.random.uniform(0.1, 3))
        finally:
            self.running.discard(ended)
        if ended.done() and ended.result() == "killed":
            raise WorkerDied
        result = self._result(request, version, aborted=ended.done())
        world.returned.setdefault(request.session_id.rpartition(".")[0], []).append((request, result))
        return self._result(request, version, aborted=False) if self.mixes else result

    def _result(self, request, version, *, aborted):
        drawn = self.world.random
        ids = [drawn.choice(self.world.plain) for _ in range(drawn.randint(0 if aborted else 1, 5))]
        if not aborted:
            ids.append(request.sampling.stop_token_ids[0])
        n = len(ids)
        return GenerateResult(
            request_id=request.request_id,
            output_ids=ids,
            logprobs=[-drawn.random() for _ in ids],  # the mark of a token
            entropies=np.full(n, 0.5),
            versions=np.full(n, version),
            finish_reason=FinishReason.ABORT if aborted else FinishReason.STOP,
            spec=SpecCounts(),
        )

    def end_all(self, how):
        for ended in self.running:
            ended.done() or ended.set_result(how)

    def abort(self, request_ids=None):
        pass

    def end_session(self, name):
        pass


class World:
    """One schedule. It is the suite, and the endpoint that agents find by their key."""

    max_turns = 12

    def __init__(self, model, path, seed, *, prompts, at_once=2, mixes=False):
        self.chat, self.plain = model
        self.random, self.version, self.seed, self.mixes = random.Random(seed), 0, seed, mixes
        self.events, self.returned, self.sessions, self.groups = Counter(), {}, {}, {}
        self.ledger = Ledger(path, lambda kind, **_: self.events.update([kind]))
        self.at_once = asyncio.Semaphore(at_once)
        # Long names, so that a ledger without space for them notices.
        names = [f"g{n}-{'x' * 700}" for n in range(prompts)]
        self.prompts = [Prompt(instance_id=f"i{n}", group_id=g, seed=n) for n, g in enumerate(names)]
        self.numbers = itertools.count()
        self.workers = [self.worker() for _ in range(2)]

    def worker(self):
        one = Collector(
            engine=Engine(self),
            suite=self,
            chat=self.chat,
            rollout=RolloutConfig(max_context=2048, max_new_tokens=64),
            env=EnvConfig(),
            agents=self,
        )
        one._turns.engine.mixes = self.mixes
        one._threads = Inline()
        one._sessions = self.numbers  # so that names of sessions tell workers apart
        return one

    async def open(self, attempt):
        address = AgentAddress(root_url="", api_key=attempt.session_id, answer_at=None)
        session = self.sessions[attempt.session_id] = Session(attempt, ToolParser.HERMES, address)
        return session

    def episode(self, instance_id, seed):
        return Episode(self, random.Random(f"{self.seed} {seed}"))

    async def disturb(self):
        """Faults, until the schedule is over."""
        faults = ["updated", "updated", "killed", "full"]
        self.random.shuffle(faults)
        for fault in itertools.cycle(faults):
            await asyncio.sleep(self.random.uniform(1, 3))
            if fault == "updated":
                self.version += 1
                for worker in self.workers:
                    worker._turns.engine.end_all("updated")
            elif fault == "killed":
                index = self.random.randrange(len(self.workers))
                self.workers[index]._turns.engine.end_all("killed")
                self.workers[index] = self.worker()
            elif not self.ledger._in_memory:
                self.ledger._db.execute("PRAGMA max_page_count = 1")
            self.events[fault] += 1

    async def roll_out(self, index, prompt):
        """What the controller does with a prompt."""
        async with self.at_once:
            await self.roll_out_now(index, prompt)

    async def roll_out_now(self, index, prompt):
        self.ledger.admitted(index, prompt, self.version)
        while prompt.group_id not in self.groups:
            self.ledger.generating(prompt, prompt.trajectory_ids(SIBLINGS))
            try:
                worker = self.random.choice(self.workers)
                self.groups[prompt.group_id] = await worker.collect(prompt, SIBLINGS)
            except WorkerDied:
                self.ledger.reopen(prompt.group_id)
                self.events["reopened"] += 1
        group = self.groups[prompt.group_id]
        self.ledger.completed(group)
        if any(t.status is TrajectoryStatus.COMPLETE for t in group.trajectories):
            self.ledger.trained([group], self.version + 1)
        else:
            self.ledger.dropped(prompt.group_id, "masked")

    async def run(self):
        disturbing = asyncio.ensure_future(self.disturb())
        try:
            await asyncio.gather(*(self.roll_out(*each) for each in enumerate(self.prompts)))
        finally:
            disturbing.cancel()
        self.check()
        self.ledger.close()

    def check(self):
        """The ledger is exact; tokens of an attempt are those of its own finished turns, each once."""
        assert self.ledger.violations(ended=True) == []
        trained = 0
        for group in self.groups.values():
            assert len(group.trajectories) == SIBLINGS
            for trajectory in group.trajectories:
                if trajectory.status is not TrajectoryStatus.COMPLETE:
                    self.events["masked"] += 1
                    continue
                trained += 1
                (name,) = [n for n, s in self.sessions.items() if s._attempt.trajectory is trajectory]
                sampled = trajectory.loss_mask.astype(bool)
                recorded = zip(
                    trajectory.rollout_logprobs[sampled].tolist(),
                    trajectory.token_ids[sampled].tolist(),
                    trajectory.versions[sampled].tolist(),
                    strict=True,
                )
                assert sorted(recorded) == sorted(self.of_session(name))
                self.events["abandoned"] += trajectory.info.get("abandoned", 0)
        count = "SELECT COUNT(*) FROM trajectories WHERE state = 'trained'"
        assert self.ledger._db.execute(count).fetchone()[0] == trained

    def of_session(self, name):
        """(logprob, token, version) of all turns that the engine finished for an attempt."""
        turns = {}
        for request, result in self.returned.get(name, []):
            turns.setdefault(request.request_id.rpartition("/")[0], []).append(result)
        tokens = []
        for parts in turns.values():
            if parts[-1].finish_reason is FinishReason.ABORT:
                continue  # its client left
            for part in parts:
                tokens += zip(
                    part.logprobs.tolist(), part.output_ids.tolist(), part.versions.tolist(), strict=True
                )
            self.events["turns of two versions"] += (
                len({v for part in parts for v in part.versions.tolist()}) > 1
            )
        return tokens


class Episode:
    """An agent that behaves as its seed says."""

    def __init__(self, world, drawn):
        self.world, self.random = world, drawn

    async def run_agent(self, address):
        session = self.world.sessions[address.api_key]
        messages = [{"role": "user", "content": "begin"}]
        for turn in range(self.random.randint(1, 4)):
            act = self.random.choice(["ask", "ask", "parallel", "edit", "leave"])
            asked = ChatRequest(messages=list(messages), tools=[])
            if act == "leave":
                leaving = asyncio.ensure_future(session.chat(asked))
                await asyncio.sleep(self.random.uniform(0, 2))
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            both = [session.chat(asked) for _ in range(1 + (act == "parallel"))]
            (reply,), *_ = await gather_or_cancel(both)
            content = "edited" if act == "edit" else reply.content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"{turn}"}]
        if self.random.random() < 0.05:
            raise RuntimeError("the agent fails")
        return "done"

    def step(self, answer):
        return StepResult(done=True, reward=self.random.random())


@pytest.fixture(scope="module")
def model():
    tokenizer = tokenizer_for(templates()["qwen2_5"])
    chat = ChatFormat(tokenizer)
    return chat, [t for t in range(len(tokenizer)) if not chat.token_texts([t])[0].startswith("<")]


def played(model, path, seed, **options):
    """Play a schedule; return what happened."""
    loop = VirtualLoop()
    try:
        world = World(model, path, seed, **options)
        loop.run_until_complete(world.run())
        return world
    finally:
        loop.close()


def test_nothing_is_lost_or_mixed_in_200_schedules(model, tmp_path):
    events = Counter()
    for seed in range(SEEDS):
        events += played(model, tmp_path / f"{seed}.sqlite", seed, prompts=5).events
    wanted = (
        "updated",
        "killed",
        "reopened",
        "turns of two versions",
        "masked",
        "abandoned",
        "ledger_in_memory",
    )
    assert all(events[name] > SEEDS / 20 for name in wanted), events


def test_200_sessions_at_once_lose_and_mix_nothing(model, tmp_path):
    world = played(model, tmp_path / "ledger.sqlite", 0, prompts=100, at_once=100)
    assert len(world.sessions) >= 200 and world.events["reopened"] > 0


def test_an_engine_that_mixes_requests_up_is_caught(model, tmp_path):
    with pytest.raises(AssertionError):
        played(model, tmp_path / "ledger.sqlite", 0, prompts=4, mixes=True)
