"""Workers that join, drain, die and hang while weights change: nothing is lost, and nobody plays old weights.

The real pool over played actors, in virtual time, 200 seeds. A trainer publishes a version after every few
groups; groups are asked for all the while; a schedule adds, drains (with and without enough time), kills and
stops workers at random moments, also while others join and while weights are on their way.
"""

import asyncio
import random
import types

import pytest
from ray.exceptions import RayActorError

from rlpipe.actors import workers
from rlpipe.actors.workers import Workers
from rlpipe.config.run import ClusterConfig
from tests.helpers.virtual_time import VirtualLoop

pytestmark = pytest.mark.property
SEEDS, GROUPS, VERSIONS = 200, 40, 8


class Actor:
    """A rollout worker: slow to start, to play and to take weights; `ended` when it is killed."""

    def __init__(self, world):
        self.world, self.version, self.ended = world, 0, asyncio.get_running_loop().create_future()
        self.closed = self.hangs = False
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

    async def _take_events(self):
        return []

    async def _update_weights(self, version):
        await self._ready()
        await asyncio.sleep(self.world.random.uniform(0.1, 3))
        self.version = version

    async def _collect(self, index):
        await self._ready()
        begun = self.version
        if begun < self.world.served:
            self.world.wrong.append(f"group {index} began on version {begun} of {self.world.served}")
        await asyncio.sleep(self.world.random.uniform(1, 20))
        if self.closed:
            self.world.wrong.append(f"group {index} ended on a worker that had left")
        return index

    async def _close(self):
        self.closed = True


class World:
    """One schedule."""

    def __init__(self, seed):
        self.random, self.wrong, self.events = random.Random(seed), [], []
        self.served, self.actors = 0, []

    def spawn(self, number):
        self.actors.append(Actor(self))
        return self.actors[-1]

    def kill(self, actor):
        if not actor.ended.done():
            actor.ended.set_result(None)

    async def play(self):
        """Returns the groups that came back."""
        config = ClusterConfig(max_restarts=10**6, hang_s=40.0)
        self.pool = Workers(config, self.spawn, lambda kind, **_: self.events.append(kind), 3)
        disturbing = asyncio.ensure_future(self._disturb())
        publishing = asyncio.ensure_future(self._publish())
        found = []
        async with asyncio.TaskGroup() as tasks:
            for index in range(GROUPS):
                tasks.create_task(self._group(index, found))
                await asyncio.sleep(self.random.uniform(0, 3))
        disturbing.cancel()
        await publishing
        await asyncio.gather(disturbing, return_exceptions=True)
        members = [worker.actor for worker in self.pool.members]
        if any(not actor.ended.done() for actor in self.actors if actor not in members):
            self.wrong.append("an actor lives that is no member")
        if len({worker.number for worker in self.pool.members}) < len(self.pool.members):
            self.wrong.append("two workers have one number")
        return found

    async def _group(self, index, found):
        found.append(await self.pool.on_some("collect", index))

    async def _publish(self):
        for version in range(1, VERSIONS + 1):
            await asyncio.sleep(self.random.uniform(2, 8))
            self.pool.newest = "update_weights", version
            await self.pool.on_all("update_weights", version)
            self.served = version
            for one in self.pool.members:
                if one.actor.version < version and not one.actor.ended.done():
                    self.wrong.append(f"worker {one.number} is not given version {version}")

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


def test_pools_that_change_lose_nothing_and_serve_the_newest_weights(monkeypatch):
    seen = []
    for seed in range(SEEDS):
        loop, world = VirtualLoop(), World(seed)
        with monkeypatch.context() as patch:
            patch.setattr(
                workers, "ray", types.SimpleNamespace(kill=world.kill, cancel=lambda answer: answer.close())
            )
            asyncio.set_event_loop(loop)
            try:
                found = loop.run_until_complete(asyncio.wait_for(world.play(), 3600))
            except Exception as error:
                raise AssertionError(f"seed {seed} at {loop.now:.0f} s") from error
            finally:
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left) if left else asyncio.sleep(0))
                asyncio.set_event_loop(None)
                loop.close()
        assert sorted(found) == list(range(GROUPS)) and not world.wrong, f"seed {seed}: {world.wrong[:3]}"
        seen += world.events
    counts = {kind: seen.count(kind) for kind in sorted(set(seen))}
    print(counts)
    for kind in ("joined", "left", "died"):
        assert counts[f"rollout_worker_{kind}"] > SEEDS
    assert counts["played again"] > SEEDS / 4 and counts["drained in time"] > SEEDS / 4
    assert counts["rollout_worker_hung"] > SEEDS / 4 and counts["refused: the last"] > SEEDS / 20
    assert counts["died while it joined"] > SEEDS / 20
