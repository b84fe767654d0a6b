"""The graph as Ray actors: N rollout workers, tp * dp trainer ranks.

With cluster.share_gpus worker n and trainer rank n share a GPU; otherwise each has its own.

Owns placement, routing to the least loaded worker, and replacing a dead rollout worker: the new one
gets the newest weights before it serves, and what the dead one was playing is played again, so no
prompt is lost. A worker that does not answer within `cluster.hang_s` is killed, which makes it a dead one.
Weights pass from trainer to workers as an object-store reference, or are broadcast by the trainer's first
rank to all SGLang servers at once (rollout.sglang.weight_transfer=collective). When a trainer rank dies or
hangs, all ranks are ended and `TrainerLost` is raised; `rebuild_trainer` starts others, which have learnt
nothing. A half (`run.half`) has no workers, or no ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.acceptance.probe import ProbeTable
from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.cluster import TrainerLost
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import Config
from rlpipe.metrics.values import Mean, Value, reduce
from rlpipe.types import Group, Prompt, RunStopped, Trajectory
from rlpipe.weights.collective import Offer, Rendezvous
from rlpipe.weights.payload import unpack_weights

if TYPE_CHECKING:
    import torch

_WRITING = "writing"  # concurrency group of a rank: its checkpoint is written beside its steps
_GIVING = "giving"  # another: it hands out weights that it has published
_CLOSE_S = 30.0  # in which an actor closes: its server alone is given ten
_GRACE_S = 10.0  # in which a rank's death becomes known, when another rank failed because of it


def hosts_and_gpus() -> tuple[int, bool]:
    """How many hosts the running Ray cluster has, and whether any has a GPU."""
    return sum(node["Alive"] for node in ray.nodes()), bool(ray.cluster_resources().get("GPU"))


class RayCluster:
    """Started by `launch`, after `ray.init`. on_event: told of every fault (kind, fields)."""

    def __init__(self, config: Config, on_event: Callable[..., None]) -> None:
        self._config = config
        self._on_event = on_event
        half = config.run.half
        gpus: float = 1 if ray.cluster_resources().get("GPU") else 0
        self._pairs = None
        if config.cluster.share_gpus:
            self._pairs, gpus = _pairs(config.rollout.workers), 0.5
        own = config.rollout.sglang.tp if config.rollout.engine is EngineKind.SGLANG else 1
        self._options = {"num_cpus": 1, "num_gpus": gpus * own, "max_concurrency": 1000}
        self._rollouts = [self._spawn_rollout(n) for n in range(config.rollout.workers * half.rolls)]
        self._load = [0] * len(self._rollouts)
        self._restarts = 0
        self._respawning = asyncio.Lock()
        self._newest: tuple[str, Any] | None = None  # how a worker is given the newest weights
        self._group: Rendezvous | None = None  # of trainer and servers, where the trainer broadcasts
        self._members: list[str] = []  # the servers in it
        beside = {_WRITING: 1, _GIVING: 1}
        self._trainer_options = {"num_cpus": 1, "num_gpus": gpus, "concurrency_groups": beside}
        self._trainers: list[Any] = []
        if half.trains:
            self._start_trainers()
        ray.get([w.metrics.remote() for w in self._rollouts])

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await self._on_some_worker("collect", prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        count = len(self._rollouts)
        shares = [list(instance_ids[n::count]) for n in range(count)]
        played = await asyncio.gather(
            *(self._on_some_worker("evaluate", share, samples, temperature) for share in shares if share)
        )
        return [trajectory for part in played for trajectory in part]

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        if not self._config.run.half.trains:
            return {}
        return (await self._on_trainers("step", ray.put(groups)))[0]

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        return (await self._on_trainers("probe", ray.put(trajectories)))[0]

    async def freeze_draft(self) -> None:
        await self._on_trainers("freeze_draft")

    async def publish_weights(self, version: int) -> dict[str, Value]:
        if not (self._rollouts and self._config.run.half.trains):
            return {}
        started = time.monotonic()
        if self._config.broadcasts_weights:
            metrics = await self._broadcast(version)
        else:
            exports = [t.export.remote(version) for t in self._trainers]
            await self._on_trainers("__ray_ready__")  # behind the export: no weights are fetched here
            self._newest = "update_weights", exports[0]
            metrics = reduce(await asyncio.gather(*self._on_workers(*self._newest)))
        metrics["timing_s/update_weights"] = Mean(time.monotonic() - started, 1)
        return metrics

    async def _broadcast(self, version: int) -> dict[str, Value]:
        """From the trainer to all servers at once: neither here nor through the object store."""
        trainer = self._trainers[0]
        found = await asyncio.gather(*self._on_workers("membership"))
        members = [member for member in found if member.server]  # no other is waited for
        servers = [member.server for member in members]
        if self._group is None or servers != self._members or {m.group for m in members} - {self._group.name}:
            opening = trainer.open_group.remote(self._trainer_host, len(members))
            await self._on_trainers("__ray_ready__")  # behind it
            self._group, self._pieces = await opening
            self._members = servers
        sending = [t.broadcast.remote(version) for t in self._trainers]
        offer = Offer(
            version=version,
            group=self._group,
            members=servers,
            ranks=self._config.rollout.sglang.tp,
            pieces=self._pieces,
            sent=partial(_asked, "does not tell of its broadcast", sending[0]),
            weights=partial(_given, trainer, version, sending[0]),
        )
        self._newest = "receive_weights", offer
        taking = asyncio.gather(*self._on_workers(*self._newest), return_exceptions=True)
        try:
            await self._on_trainers("__ray_ready__")
        finally:  # without a trainer they fail as well, and tell less of it
            taken = await taking
        if failed := next((one for one in taken if isinstance(one, BaseException)), None):
            raise failed
        return reduce(taken)

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self._on_trainers("begin_save", directory)

        async def write() -> None:
            await self._on_trainers("write_save", group=_WRITING)
            await self._on_trainers("end_save")

        return write

    async def load(self, directory: Path) -> None:
        await self._on_trainers("load", directory)

    async def rebuild_trainer(self) -> None:
        self._newest = self._group = None  # of what was lost
        try:
            await asyncio.to_thread(self._start_trainers)
        except RayActorError as error:
            raise self._lost(self._trainers, "trainer_died", error=_first_line(error)) from error

    async def rollout_metrics(self) -> dict[str, Value]:
        return reduce(await asyncio.gather(*self._on_workers("metrics")))

    async def close(self) -> None:
        actors = self._rollouts + self._trainers
        closing = (asyncio.wait_for(actor.close.remote(), _CLOSE_S) for actor in actors)
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):  # the run is over, and `kill` ends what did not close
                self._on_event("close_failed", error=_first_line(error))
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
        for actor in self._rollouts + self._trainers:
            ray.kill(actor)

    def _spawn_rollout(self, n: int) -> Any:
        return ray.remote(RolloutWorker).options(**self._options, **self._place(n)).remote(self._config, n)

    async def _on_some_worker(self, method: str, *args: Any) -> Any:
        """Call the least loaded worker."""
        n = min(range(len(self._rollouts)), key=self._load.__getitem__)
        self._load[n] += 1
        try:
            return await self._call(n, method, *args)
        finally:
            self._load[n] -= 1

    async def _call(self, n: int, method: str, *args: Any) -> Any:
        """Call worker n; when it dies, replace it and call again."""
        while True:
            worker = self._rollouts[n]
            answer = getattr(worker, method).remote(*args)
            seconds = self._config.cluster.hang_s or None
            try:
                return await asyncio.wait_for(_wait(answer), seconds)
            except (
                RayTaskError
            ):  # it answers; Ray's error is of the class of its cause too, e.g. TimeoutError
                raise
            except TimeoutError:
                self._on_event("rollout_worker_hung", worker=n, seconds=seconds)
                ray.kill(worker)  # the next call finds it dead
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            except RayActorError as error:
                await self._replace(n, worker, error)

    def _start_trainers(self) -> None:
        """New ranks, joined with one another."""
        ranks = self._config.trainer.world_size
        trainer = ray.remote(**self._trainer_options)(TrainerWorker)
        self._trainers = [
            trainer.options(**self._place(rank)).remote(self._config, rank, ranks) for rank in range(ranks)
        ]
        first = self._trainers[0]
        several = bool(self._config.cluster.address)
        host = ray.get(first.__ray_call__.remote(_node_ip)) if several else "127.0.0.1"
        self._trainer_host = host
        master = ray.get(first.address.remote(host))
        ray.get([t.start.remote(master) for t in self._trainers])

    async def _on_trainers(self, method: str, *args: Any, group: str | None = None) -> list[Any]:
        """Call every trainer rank, in a concurrency group of its actor. Raises TrainerLost."""
        if not self._trainers and self._config.run.half.trains:
            raise TrainerLost(f"{method}: the trainer was lost before")
        ranks = self._trainers
        methods = [getattr(rank, method) for rank in ranks]
        if group is not None:
            methods = [m.options(concurrency_group=group) for m in methods]
        seconds = self._config.cluster.hang_s or None
        answers = [asyncio.ensure_future(_wait(m.remote(*args))) for m in methods]
        try:
            return await asyncio.wait_for(asyncio.gather(*answers), seconds)
        except RayTaskError:  # of its own, or because another rank died: that is known a little later
            await asyncio.wait(answers, timeout=_GRACE_S)
            failed = [a.exception() for a in answers if a.done() and not a.cancelled()]
            if dead := next((e for e in failed if isinstance(e, RayActorError)), None):
                raise self._lost(ranks, "trainer_died", error=_first_line(dead)) from dead
            raise
        except TimeoutError:
            raise self._lost(ranks, "trainer_hung", seconds=seconds, method=method) from None
        except RayActorError as error:
            raise self._lost(ranks, "trainer_died", error=_first_line(error)) from error

    def _lost(self, ranks: list[Any], kind: str, **fields: Any) -> TrainerLost:
        """End what is left of these ranks; told once, whoever notices it first."""
        if self._trainers is ranks:
            self._on_event(kind, **fields)
            self._trainers = []
            for rank in ranks:
                ray.kill(rank)
        return TrainerLost(f"{kind}: {fields}")

    def _place(self, n: int) -> dict[str, Any]:
        """Options of worker or rank n: beside the other one, if they share a GPU."""
        if self._pairs is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._pairs, placement_group_bundle_index=n)
        return {"scheduling_strategy": strategy}

    def _on_workers(self, method: str, *args: Any) -> list[Coroutine[Any, Any, Any]]:
        """Calls of every worker."""
        return [self._told(n, method, *args) for n in range(len(self._rollouts))]

    async def _told(self, n: int, method: str, *args: Any) -> Any:
        """Call worker n, and tell of the faults it knows of."""
        try:
            return await self._call(n, method, *args)
        finally:
            for kind, fields in await self._call(n, "take_events"):
                self._on_event(kind, worker=n, **fields)

    async def _replace(self, n: int, dead: Any, error: RayActorError) -> None:
        """Put a new worker in the dead one's place, once, with the newest weights."""
        async with self._respawning:
            while self._rollouts[n] is dead:
                self._restarts += 1
                reason = _first_line(error)
                self._on_event("rollout_worker_died", worker=n, restarts=self._restarts, error=reason)
                if self._restarts > self._config.cluster.max_restarts:
                    raise RunStopped(
                        f"rollout workers died {self._restarts} times (cluster.max_restarts="
                        f"{self._config.cluster.max_restarts}); the last: {reason}. Run again, it continues "
                        "from the newest checkpoint."
                    ) from error
                worker = self._spawn_rollout(n)
                try:
                    if self._newest is not None:
                        method, what = self._newest
                        await getattr(worker, method).remote(what)
                    self._rollouts[n] = worker
                except RayTaskError:
                    raise
                except RayActorError as again:  # this one died while it was started
                    error = again


def _pairs(count: int) -> PlacementGroup:
    """A GPU and two CPUs for each worker and its trainer rank. Raises ValueError where Ray has fewer."""
    needed = {"GPU": count, "CPU": 2 * count}
    there = ray.cluster_resources()
    if short := [name for name, amount in needed.items() if there.get(name, 0) < amount]:
        found = {name: there.get(name, 0) for name in short}
        raise ValueError(
            f"cluster.share_gpus=true with {count} workers needs {needed}, and Ray has {found}: lower "
            "rollout.workers and trainer.tp * trainer.cp * trainer.dp, or set cluster.share_gpus=false."
        )
    return ray.util.placement_group([{"GPU": 1, "CPU": 2}] * count)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__  # a TimeoutError has no words


async def _wait(answer: Any) -> Any:
    """An object reference as a coroutine."""
    return await answer


async def _asked(failing: str, answer: Any) -> Any:
    """Inside a rollout worker: the trainer's answer. Raises RuntimeError: its death is not the worker's."""
    try:
        return await answer
    except RayError as error:
        raise RuntimeError(f"the trainer {failing}: {_first_line(error)}") from None


async def _given(trainer: Any, version: int, sent: Any) -> Mapping[str, torch.Tensor]:
    """Inside a rollout worker whose server could not take part: published weights, from the trainer's memory.

    sent: the reference of their broadcast, whose end is waited for.
    """
    failing = f"does not give out version {version}"
    await _asked(failing, sent)
    payload = trainer.newest.options(concurrency_group=_GIVING).remote(version)
    return unpack_weights(await _asked(failing, payload))


def _node_ip(_: Any) -> str:
    """Runs inside an actor: the address of its machine."""
    return ray.util.get_node_ip_address()
