"""Workers that join, drain, die and hang under the real loop: prompts are trained on once, none too stale.

Real controller, backlog, ledger and pool over played actors and a played trainer, in virtual time. A schedule
adds, drains (with and without enough time), kills and stops workers at random moments, also while others join
and while weights are on their way. Of a worker that drains the others play turn after turn.
"""

import asyncio
import random
import types
from functools import partial

import pytest
from ray.exceptions import RayActorError

from rlpipe.actors import workers
from rlpipe.actors.workers import Workers
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.run import ClusterConfig, Config, RunSettings, ValConfig
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.controller import Controller
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.metrics.bus import MetricsBus
from rlpipe.types import Group, Trajectory
from tests.helpers.virtual_time import VirtualLoop

pytestmark = pytest.mark.property
SEEDS, STEPS, PROMPTS, STALENESS = 60, 8, 4, 2


class Actor:
    """A rollout worker: slow to start, to play turns and to take weights; `ended` when it is killed."""

    def __init__(self, world):
        self.world, self.version, self.ended = world, 0, asyncio.get_running_loop().create_future()
        self.closed = self.hangs = False
        self.away, self.asked, self.waiting = asyncio.Event(), asyncio.Queue(), {}
        seconds = world.random.uniform(0.5, 8)
        self.up = asyncio.ensure_future(asyncio.sleep(seconds))

    def __getattr__(self, method):
        return types.SimpleNamespace(remote=lambda *args: self._answer(method, *args))

    def _answer(self, method, *args):
        async def answer():
            if self.ended.done():
                raise RayActorError()
            working = asyncio.ensure_future(getattr(self, f"_{method}")(*args))
            try:
                await asyncio.wait({working, self.ended}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    raise RayActorError()
                return working.result()
            finally:
                working.cancel()

        return answer()

    async def _ready(self):
        await asyncio.shield(self.up)
        if self.hangs:
            await asyncio.Event().wait()

    async def _metrics(self):
        await self._ready()
        return {}

    async def _take_events(self):
        return []

    async def _update_weights(self, version):
        await self._ready()
        if self.away.is_set():
            self.world.wrong.append(f"version {version} was sent to a worker without an engine")
        await asyncio.sleep(self.world.random.uniform(0.1, 3))
        self.version = version

    async def _collect(self, prompt, size):
        await self._ready()
        members = []
        for name in prompt.trajectory_ids(size):
            turns = [await self._generate(None) for _ in range(self.world.random.randint(1, 3))]
            if self.closed:
                self.world.wrong.append(f"group {prompt.group_id} ended on a worker that had left")
            members.append(
                Trajectory(
                    trajectory_id=name,
                    group_id=prompt.group_id,
                    instance_id=prompt.instance_id,
                    token_ids=list(range(len(turns))),
                    loss_mask=[1] * len(turns),
                    rollout_logprobs=[-1.0] * len(turns),
                    entropies=[1.0] * len(turns),
                    versions=turns,
                    reward=self.world.random.random(),
                )
            )
        return Group(prompt=prompt, trajectories=members)

    async def _generate(self, _):
        """The version that played a turn: the one when it began."""
        await self._ready()
        if not self.away.is_set():
            if self.version < self.world.served:
                self.world.wrong.append(f"a turn began on version {self.version} of {self.world.served}")
            begun, leaving = self.version, asyncio.ensure_future(self.away.wait())
            await asyncio.wait({leaving}, timeout=self.world.random.uniform(1, 8))
            leaving.cancel()
            if not self.away.is_set():
                return begun
        name = f"turn {self.world.random.random()}"
        played = self.waiting[name] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(types.SimpleNamespace(request_id=name))
        self.world.events.append("turn handed over")
        return await played

    async def _hand_over(self):
        await self._ready()
        if self.world.random.random() < 0.2:
            return False  # its rollouts are disturbed
        self.away.set()
        await asyncio.sleep(self.world.random.uniform(0.1, 2))
        return True

    async def _next_turn(self):
        return await self.asked.get()

    async def _turn_generated(self, name, version):
        self.waiting.pop(name).set_result(version)

    async def _turn_failed(self, name, reason):
        self.world.wrong.append(f"a turn failed: {reason}")

    async def _close(self):
        self.closed = True


class World:
    """One schedule, and the cluster that the controller drives."""

    def __init__(self, seed, directory):
        self.random, self.wrong, self.events = random.Random(seed), [], []
        self.served, self.actors, self.trained = 0, [], []
        config = Config(
            run=RunSettings(dir=str(directory), steps=STEPS, save_every=0),
            pipeline=PipelineConfig(prompts_per_step=PROMPTS, group_size=2, max_staleness=STALENESS),
            val=ValConfig(every=0),
        )
        self.bus, self.ledger = MetricsBus([]), Ledger(directory / "ledger.sqlite")
        self.controller = Controller(
            config=config,
            run_dir=directory,
            cluster=self,
            prompts=PromptStream([f"i{n}" for n in range(7)], seed=seed),
            held_out={},
            bus=self.bus,
            ledger=self.ledger,
            checkpoints=CheckpointStore(directory / "checkpoints", keep=1),
        )

    def spawn(self, number):
        self.actors.append(Actor(self))
        return self.actors[-1]

    def kill(self, actor):
        if not actor.ended.done():
            actor.ended.set_result(None)

    async def play(self):
        """Run to the end."""
        config = ClusterConfig(max_restarts=10**6, hang_s=80.0)
        self.pool = Workers(config, self.spawn, count=3, on_event=lambda kind, **_: self.events.append(kind))
        disturbing = asyncio.ensure_future(self._disturb())
        await self.controller.run()
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        members = [worker.actor for worker in self.pool.members]
        if any(not actor.ended.done() for actor in self.actors if actor not in members):
            self.wrong.append("an actor lives that is no member")
        if len({worker.number for worker in self.pool.members}) < len(self.pool.members):
            self.wrong.append("two workers have one number")

    async def collect(self, prompt, size):
        return await self.pool.call_least_loaded(lambda worker: worker.collect.remote(prompt, size))

    async def train_step(self, groups):
        version = self.controller.version
        self.trained += [group.prompt.group_id for group in groups]
        for trajectory in (one for group in groups for one in group.trajectories):
            if version - trajectory.oldest_version > STALENESS:
                self.wrong.append(
                    f"{trajectory.trajectory_id} is of {trajectory.oldest_version} at {version}"
                )
        await asyncio.sleep(self.random.uniform(1, 10))
        return {}

    async def publish_weights(self, version):
        return partial(self._send, version)

    async def _send(self, version):
        async with self.pool.updating:
            self.pool.newest = load = lambda worker: worker.update_weights.remote(version)
            await self.pool.call_all(load, serving=True)
        self.served = version
        for one in self.pool.members:
            if one.actor.version < version and not (one.relayed or one.actor.ended.done()):
                self.wrong.append(f"worker {one.number} is not given version {version}")
        return {}

    async def probe(self, trajectories):
        return []

    async def rollout_metrics(self):
        await self.pool.call_all(lambda worker: worker.metrics.remote())
        return {}

    async def save(self, directory):
        async def write():
            (directory / "weights").write_text("")

        return write

    async def _disturb(self):
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self.random.uniform(0.5, 6))
                tasks.create_task(getattr(self, f"_{self.random.choice(('add', 'drain', 'die', 'hang'))}")())

    async def _add(self):
        if len(self.pool.members) < 6:
            try:
                await self.pool.join(self.random.randint(1, 2))
            except RayActorError:
                self.events.append("died while it joined")

    async def _drain(self):
        worker = self.random.choice(self.pool.members)
        try:
            again = await self.pool.leave(worker.number, self.random.choice((0, 3, 60)))
            self.events.append("played again" if again else "drained in time")
        except ValueError as error:
            self.events.append("refused: the last" if "the last one" in str(error) else "refused: unknown")

    async def _die(self):
        self.kill(self.random.choice(self.actors))

    async def _hang(self):
        if self.random.random() < 0.3:
            self.random.choice(self.pool.members).actor.hangs = True


def test_pools_that_change_lose_nothing_and_serve_the_newest_weights(tmp_path, monkeypatch):
    seen = []
    for seed in range(SEEDS):
        loop = VirtualLoop()
        directory = tmp_path / str(seed)
        (directory / "checkpoints").mkdir(parents=True)
        world = World(seed, directory)
        with monkeypatch.context() as patch:
            patch.setattr(
                workers, "ray", types.SimpleNamespace(kill=world.kill, cancel=lambda answer: answer.close())
            )
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(asyncio.wait_for(world.play(), 3600))
            except Exception as error:
                raise AssertionError(f"seed {seed} at {loop.now:.0f} s: {world.wrong[:3]}") from error
            finally:
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left) if left else asyncio.sleep(0))
                asyncio.set_event_loop(None)
                loop.close()
        assert not world.wrong, f"seed {seed}: {world.wrong[:3]}"
        assert len(set(world.trained)) == len(world.trained) == STEPS * PROMPTS, f"seed {seed}"
        assert world.ledger.violations(ended=True) == [], f"seed {seed}"
        world.ledger.close()
        world.bus.close()
        seen += world.events
    counts = {kind: seen.count(kind) for kind in sorted(set(seen))}
    print(counts)
    for kind in ("joined", "left", "died"):
        assert counts[f"rollout_worker_{kind}"] > SEEDS
    assert counts["played again"] > SEEDS / 20 and counts["drained in time"] > SEEDS / 4
    assert counts["turn handed over"] > SEEDS and counts["rollout_worker_handed_over"] > SEEDS / 4
    assert counts["rollout_worker_hung"] > SEEDS / 10 and counts["refused: the last"] > SEEDS / 20
    assert counts["died while it joined"] > SEEDS / 20
