"""A simulated group and simulated servers under the real cluster, sender, sync and replica; virtual time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import random
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlpipe.actors import ray_cluster, workers
from rlpipe.actors.ray_cluster import RayCluster
from rlpipe.actors.workers import Workers
from rlpipe.config.run import Config
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.sglang import arguments, replica, updates
from rlpipe.rollout.sglang.engine import SglangEngine
from rlpipe.rollout.sglang.environment import SglangEnvironment
from rlpipe.rollout.sglang.replica import DesiredWeights, Replica
from rlpipe.rollout.sglang.updates import Updates
from rlpipe.weights import canary, process_group, sender
from rlpipe.weights.buckets import Bucket
from rlpipe.weights.offer import Checksums, Rendezvous
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.session import WeightSession
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports import TRANSPORTS
from tests.helpers.cli import ROOT
from tests.helpers.played_actors import Actor
from tests.helpers.tensor_transport import TensorTransport
from tests.helpers.virtual_time import VirtualLoop

TINY = ROOT / "models" / "tiny"
NAMES = ("a", "b", "c", "d")
FAULTS = ("none", "die", "hang", "deaf", "no join", "stuck", "raise", "resume")


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), float(version)) for name in NAMES}


def sums_of(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """In place of hashes: the first element of each tensor."""
    return {name: str(float(tensor[0])) for name, tensor in weights.items()}


class FirstElements:
    """`BucketChecksums` of one rank, by `sums_of`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._sums: dict[str, str] = {}

    def add(self, bucket: Bucket) -> None:
        """Add a bucket."""
        self._sums |= sums_of(dict(bucket))

    def result(self) -> Checksums:
        """The sums of all buckets."""
        return Checksums(ranks=[self._sums])


class Call:
    """What a group's call gives: done, failed, or never done."""

    def __init__(self, world: World) -> None:
        self.world, self.future = world, world.loop.create_future()
        self.future.add_done_callback(lambda future: future.exception())

    def result(self, timeout: float | None = None) -> None:
        async def waited() -> None:
            # a watchdog like NCCL's: what hangs longer than this ends the process
            done, _ = await asyncio.wait({self.future}, timeout=1e4 if timeout is None else min(timeout, 1e4))
            if not done and (timeout is None or timeout > 1e4):
                self.world.violations.append("the watchdog ended the trainer")
            if not done:
                raise TimeoutError

        self.world.loop.wait(waited())
        self.future.result()


class SimGroup:
    """In place of `process_group.Group`: a bucket is over when all ranks have it; some hang, some raise."""

    ended = False  # by no trainer of this process

    def __init__(
        self, world: World, host: str, *, ranks: int, timeout: float, backend: str, stream: Any
    ) -> None:
        self.world, self.ranks = world, ranks
        world.groups += 1
        self.rendezvous = Rendezvous(
            host=host, port=1, name=f"g{world.groups}", size=1 + ranks, backend=backend
        )
        world.by_name[self.rendezvous.name] = self
        self.members: set[Server] = set()
        self.joining: Call | None = None
        self.buckets: list[tuple[Call, torch.Tensor]] = []
        self.left = False

    def _soon(self, function: Any) -> Call:
        async def made() -> Call:
            call = Call(self.world)
            function(call)
            return call

        return self.world.loop.wait(made())

    def join(self) -> Call:
        def joined(call: Call) -> None:
            self.joining = call
            self.check()

        return self._soon(joined)

    def broadcast(self, flat: torch.Tensor) -> Call:
        return self._soon(lambda call: (self.buckets.append((call, flat.clone())), self.check()))

    def leave(self) -> Call:
        def leave(call: Call) -> None:
            self.left = True
            self.check()
            call.future.set_result(None)

        return self._soon(leave)

    def check(self) -> None:
        """Whether what is waited for has happened."""
        if self.joining and len(self.members) == self.ranks and not self.joining.future.done():
            self.joining.future.set_result(None)
        for number, (call, _) in enumerate(self.buckets):
            there = [server for server in self.members if server.taken.get(self.rendezvous.name, 0) > number]
            if len(there) == self.ranks and not call.future.done():
                call.future.set_result(None)

    async def receive(self, server: Server, number: int) -> torch.Tensor:
        while len(self.buckets) <= number:
            if self.left and self.world.raises:
                raise ServerError("400: connection closed by peer")
            await asyncio.sleep(1.0)  # a group that hangs is one whose root is gone
        server.taken[self.rendezvous.name] = number + 1
        self.check()
        return self.buckets[number][1]


class Server:
    """One SGLang process: what it holds, and what became of it. In place of `ServerProcess`."""

    log = Path("log")

    def __init__(self, world: World, command: list[str], environment: Any, log: Path) -> None:
        self.world = world
        version = world.folders[command[1]]
        self.values = dict.fromkeys(NAMES, version)
        self.alive, self.hangs, self.paused = True, False, False
        self.deaf_until, self.group, self.taken = 0.0, "", {}
        self.fault = ""
        world.servers.append(self)
        world.newest = self

    def stop(self) -> None:
        self.alive = False

    def is_running(self) -> bool:
        return self.alive

    async def wait_until(self, condition: Any, timeout: float) -> None:
        await asyncio.sleep(self.world.rng.uniform(1, 10))
        if not await condition():
            raise RuntimeError("ended while starting")

    def look(self) -> None:
        """No server serves what was never one version."""
        if self.alive and not self.paused and len(set(self.values.values())) > 1:
            self.world.violations.append(f"a server serves {self.values}")

    async def answer(self, path: str, body: Any) -> Any:
        await asyncio.sleep(self.world.rng.uniform(0.001, 0.2))
        while self.alive and (self.hangs or self.world.loop.now < self.deaf_until):
            await asyncio.sleep(1.0)
        if not self.alive:
            raise ServerUnreachable("it is gone")
        kind = path.strip("/")
        if kind == "pause_generation":
            self.paused = True
        elif kind == "continue_generation":
            self.paused = False
        elif kind == "init_weights_update_group":
            self.world.strike(self, "no join")
            if self.hangs:
                return await self.answer(path, body)
            self.group = body["group_name"]
            group = self.world.by_name[self.group]
            group.members.add(self)
            group.check()
        elif kind == "destroy_weights_update_group":
            self.group = ""
        elif kind == "update_weights_from_distributed":
            group = self.world.by_name[body["group_name"]]
            done = self.taken.get(self.group, 0)
            self.world.strike(self, "die", "hang", "deaf", "raise")
            if not self.alive or self.hangs:
                return await self.answer(path, body)
            flat = await group.receive(self, done)
            for name, value in zip(body["names"], flat.view(torch.float32).view(-1, 2), strict=True):
                self.values[name] = int(value[0])
        elif kind == "update_weights_from_tensor":
            for name, tensor in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])):
                self.values[name] = int(tensor[0])
        elif kind == "weights_checker":
            sums = {name: str(float(value)) for name, value in self.values.items()}
            return {"ranks": [{"parallelism_info": [{"tp_rank": 0}], "checksums": sums}]}
        self.look()
        return {}


class Client:
    """In place of `SglangClient`, for the server that was started last."""

    def __init__(self, world: World, url: str, timeout: float, key: str = "") -> None:
        self.server, self.timeout, self.closed = world.newest, timeout, False

    async def post(self, path: str, body: Any, timeout: float | None = None) -> Any:
        if self.closed:
            raise ServerUnreachable("closed")
        try:
            async with asyncio.timeout(timeout or self.timeout):
                return await self.server.answer(path, body)
        except TimeoutError as error:
            raise ServerUnreachable("it took too long") from error

    async def read(self, path: str, body: Any = None) -> Any:
        return await self.post(path, body)

    async def answers(self, path: str, timeout: float = 5.0) -> bool:
        try:
            await self.post(path, {}, timeout)
        except ServerError:
            return False
        return True

    async def close(self) -> None:
        self.closed = True


class Worker:
    """A rollout worker without an engine's thread: the real replica and updates."""

    def __init__(self, world: World, config: Config) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        sync = WeightSync(config.rollout, SpecConfig(), TINY, on_gpu=False, folder=Path("/nowhere"))
        self.replica = Replica(
            config.rollout,
            SpecConfig(),
            TINY,
            environment=SglangEnvironment(python="python", on_gpu=False),
            sync=sync,
            log_dir=Path("/nowhere"),
            version=0,
            on_event=self.note,
        )
        self.sglang = config.rollout.sglang
        self.updates = Updates(config.rollout, self.replica, sync=sync, turns=None, on_event=self.note)

    def note(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    async def membership(self) -> Any:
        return await self.updates.membership()

    async def receive_weights(self, offers: Any) -> dict[str, Any]:
        (offer,) = offers
        await self.updates.bring(DesiredWeights(weights=offer.weights, version=offer.version, offer=offer))
        return {}

    async def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    async def resume(self) -> None:
        """What `SglangEngine.resume` does, whoever calls it when."""
        with contextlib.suppress(ServerError):
            engine = types.SimpleNamespace(_replica=self.replica, _sglang=self.sglang)
            await SglangEngine._set_paused(engine, paused=False)


class Trainer:
    """Rank 0 with the real sender; everything it does blocks it."""

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.version, self.hf_config = world, 0, read_config(TINY)
        self.device = torch.device("cpu")
        self.sender = sender.WeightSender(config.rollout, self, on_gpu=False)

    def weight_buckets(self, megabytes: int, dtype: torch.dtype, *, everywhere: bool = False) -> Any:
        weights = list(weights_of(self.version).items())
        yield from (weights[:2], weights[2:])

    def bucket_plan(self, megabytes: int, dtype: torch.dtype) -> Any:
        return [[(n, w.to("meta")) for n, w in bucket] for bucket in self.weight_buckets(megabytes, dtype)]

    async def open_group(self, host: str, servers: int) -> Any:
        return await self.world.loop.thread(self.sender.open, host, servers)

    async def copy_weights(self, version: int) -> None:
        self.version = version
        await self.world.loop.thread(self.sender.copy, version)

    async def broadcast(self, version: int) -> Any:
        return await self.world.loop.thread(self.sender.send, version)

    async def newest(self) -> Any:
        return self.sender.newest()

    async def __ray_ready__(self) -> None:
        """Nothing: it is answered behind what was asked before."""


class World:
    """All of it, and the faults that a seed brings."""

    def __init__(self, seed: int, config: Config, workers: int = 3) -> None:
        self.rng, self.loop = random.Random(seed), VirtualLoop()
        self.groups, self.by_name, self.folders = 0, {}, {str(TINY): 0}
        self.servers: list[Server] = []
        self.newest: Server | None = None
        self.violations: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        self.raises = (
            self.rng.random() < 0.5
        )  # whether a group whose root left raises on the others, or hangs
        self.config, self.count = config, workers

    def strike(self, server: Server, *kinds: str) -> None:
        """The fault that is due for a server, if it is one of these."""
        fault = server.fault
        if fault not in kinds:
            return
        server.fault = ""
        if fault in ("hang", "no join"):
            server.hangs = True
        elif fault == "die":
            server.alive = False
        elif fault == "deaf":
            server.deaf_until = self.loop.now + self.rng.uniform(1, 90)
        elif fault == "raise":
            raise ServerError("500: out of memory")

    @contextlib.contextmanager
    def checkpoint(self, weights: Any) -> Any:
        folder = f"/weights/{len(self.folders)}"
        self.folders[folder] = int(next(iter(weights.values()))[0])
        yield Path(folder)

    def patch(self, monkeypatch: Any) -> None:
        """Put the world in place of processes, HTTP, groups, clocks and hashes."""
        for module in (replica, updates, process_group, sender, ray_cluster):
            monkeypatch.setattr(module, "time", self.loop)
        monkeypatch.setattr(workers, "ray", types.SimpleNamespace(cancel=lambda *_: None))
        monkeypatch.setattr(process_group, "Group", partial(SimGroup, self))
        monkeypatch.setattr(replica, "ServerProcess", partial(Server, self))
        monkeypatch.setattr(replica, "SglangClient", partial(Client, self))
        monkeypatch.setattr(replica, "_POLL_SECONDS", 2.0)
        monkeypatch.setattr(replica, "pick_port", lambda *_: 1)
        monkeypatch.setattr(replica, "served_target", lambda folder, _: contextlib.nullcontext(folder))
        monkeypatch.setattr(replica, "read_weights", lambda _: weights_of(0))
        monkeypatch.setattr(arguments, "command", lambda config, spec, path, **_: [str(path)])
        monkeypatch.setattr(arguments, "server_environment", lambda *_, **__: {})
        monkeypatch.setattr(arguments, "check_server_info", lambda *_: None)
        monkeypatch.setattr(WeightSession, "checkpoint", lambda _, weights: self.checkpoint(weights))
        monkeypatch.setitem(TRANSPORTS, WeightTransfer.COLLECTIVE, TensorTransport)

        monkeypatch.setattr(canary, "rank_fingerprints", lambda weights, *_, **__: [sums_of(weights)])
        monkeypatch.setattr(sender, "BucketChecksums", FirstElements)

    async def play(self, refits: int, limit: float) -> list[float]:
        """So many refits, with faults in each; how long each took. Raises what a run would end of."""
        self.workers = [Worker(self, self.config) for _ in range(self.count)]
        for worker in self.workers:
            await worker.replica.start()
        cluster = self.cluster = RayCluster.__new__(RayCluster)
        cluster._config, cluster._on_event = self.config, lambda kind, **fields: self.kinds.append(kind)
        actors = [Actor(worker, serial=False) for worker in self.workers]
        cluster._workers = Workers(
            self.config.cluster, actors.__getitem__, count=len(actors), on_event=cluster._on_event
        )
        cluster._trainers = [Actor(Trainer(self, self.config), serial=True)]
        cluster._groups = {}
        cluster._trainer_host = "here"
        self.told, self.kinds = [], []  # events, of refits before and of this one
        took = []
        for version in range(1, refits + 3):
            await (self._disturb() if version <= refits else self._settle(version - refits - 1))
            began = self.loop.now
            async with asyncio.timeout(limit):
                await (await cluster._copy(version))()
            took.append(self.loop.now - began)
            if version > refits and "broadcast_failed" in self.kinds:
                self.violations.append(f"version {version} was not broadcast to the servers that answer")
            for worker in self.workers:
                held = worker.replica.server.values
                if set(held.values()) != {version} or worker.replica.server.paused:
                    self.violations.append(f"after version {version} a server holds {held}")
        for worker in self.workers:
            await worker.replica.stop()
        return took

    async def _settle(self, hanging: int) -> None:
        """Wait until all servers are well, then have the first so many hang just before the refit."""
        for worker in self.workers:
            worker.replica.server.fault = ""
        await asyncio.sleep(200)
        self.told, self.kinds = self.told + self.kinds, []
        for worker in self.workers[:hanging]:
            worker.replica.server.hangs = True

    async def _disturb(self) -> None:
        """Faults before a refit, at once, and during it."""
        for worker in self.workers:
            server = worker.replica.server
            fault = self.rng.choice(FAULTS)
            if self.rng.random() < 0.15:  # just now, so that nobody has seen it
                server.alive, server.hangs = self.rng.random() < 0.5, True
            elif fault == "resume":
                self.loop.call_later(self.rng.uniform(0, 3), self._resume_soon, worker)
            else:
                server.fault = fault

    def _resume_soon(self, worker: Worker) -> None:
        """Resume at a moment of its own; what that raises would otherwise be lost with its task."""
        task = asyncio.ensure_future(worker.resume())
        self.tasks.add(task)
        task.add_done_callback(self._check_resumed)

    def _check_resumed(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.violations.append(f"a resume raised {error!r}")
