"""The graph as Ray actors: N rollout workers, tp * dp trainer ranks.

With cluster.share_gpus worker n and trainer rank n share a GPU; otherwise each has its own.

Owns placement, the trainer's ranks, and how weights reach the workers, which `workers.py` calls, replaces,
adds and drains. Weights pass from trainer to workers as an object-store reference, or are brought by the
trainer's first rank to all SGLang servers at once (rollout.sglang.weight_transfer=collective, ipc). When a
trainer rank dies or hangs, all ranks are ended and `TrainerLost` is raised; `rebuild_trainer` starts others,
which have learnt nothing. With run.half=train there are no workers, with run.half=rollout no ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.actors.workers import Workers, answer_of, close, first_line
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.loop.cluster_protocol import TrainerLost
from rlpipe.metrics.values import Mean, Value, reduce
from rlpipe.preflight.object_store import check_store
from rlpipe.types import Group, Prompt, Trajectory
from rlpipe.weights.offer import Offer, Rendezvous
from rlpipe.weights.payload import unpack_weights

if TYPE_CHECKING:
    import torch

_WRITING = "writing"  # concurrency group of a rank: its checkpoint is written beside its steps
_GIVING = "giving"  # another: it hands out weights that it has published
_GRACE_S = 10.0  # in which a rank's death becomes known, when another rank failed because of it


def hosts_and_gpus() -> tuple[int, bool]:
    """How many hosts the running Ray cluster has, and whether any has a GPU."""
    return sum(node["Alive"] for node in ray.nodes()), bool(ray.cluster_resources().get("GPU"))


def check_places(config: Config, nodes: Sequence[Mapping[str, Any]], driver: str) -> None:
    """Refuse servers that no node has the GPUs for, and records that a node's object store cannot hold.

    nodes: as `ray.nodes()` says. driver: id of the node of this process. Raises ValueError.
    """
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    most = int(max((resources.get("GPU", 0) for resources in alive.values()), default=0))
    stores = {node: int(resources.get("object_store_memory", 0)) for node, resources in alive.items()}
    if stores.get(driver):
        check_store(config, stores[driver], min(filter(None, stores.values())))
    if config.run.half.generates and 0 < most < config.rollout.cards:
        raise ValueError(
            f"rollout.sglang.tp={config.rollout.cards}: a server lies on one node, and the largest of the "
            f"Ray cluster has {most} GPUs. Set rollout.sglang.tp={most} or less; a model that does not fit "
            "into those needs nodes with larger cards."
        )


class RayCluster:
    """Started by `launch`, after `ray.init`. on_event: told of every fault (kind, fields)."""

    def __init__(self, config: Config, on_event: Callable[..., None]) -> None:
        self._config = config
        self._on_event = on_event
        run_mode = config.run.half
        check_places(config, ray.nodes(), ray.get_runtime_context().get_node_id())
        gpus: float = 1 if ray.cluster_resources().get("GPU") else 0
        self._pairs = None
        if config.cluster.share_gpus:
            self._pairs, gpus = _pairs(config.rollout.workers), 0.5
        self._options = {"num_cpus": 1, "num_gpus": gpus * config.rollout.cards, "max_concurrency": 1000}
        self._workers = Workers(
            config.cluster, self._spawn_rollout, on_event, config.rollout.workers * run_mode.generates
        )
        self._group: Rendezvous | None = None  # of trainer and servers, where the trainer broadcasts
        self._members: list[str] = []  # the servers in it
        beside = {_WRITING: 1, _GIVING: 1}
        self._trainer_options = {"num_cpus": 1, "num_gpus": gpus, "concurrency_groups": beside}
        self._trainers: list[Any] = []
        if run_mode.trains:
            self._start_trainers()
        ray.get([worker.actor.metrics.remote() for worker in self._workers.members])

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await self._workers.on_some("collect", prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        count = len(self._workers.staying)
        shares = [list(instance_ids[n::count]) for n in range(count)]
        played = await asyncio.gather(
            *(self._workers.on_some("evaluate", share, samples, temperature) for share in shares if share)
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
        if not (self._workers.members and self._config.run.half.trains):
            return {}
        started = time.monotonic()
        async with self._workers.updating:
            by = self._broadcast if self._config.broadcasts_weights else self._export
            metrics = await by(version)
        metrics["timing_s/update_weights"] = Mean(time.monotonic() - started, 1)
        return metrics

    async def _export(self, version: int) -> dict[str, Value]:
        """Through the object store, once for all workers."""
        exports = [t.export.remote(version) for t in self._trainers]
        await self._on_trainers("__ray_ready__")  # behind the export: no weights are fetched here
        newest = self._workers.newest = "update_weights", exports[0]
        return reduce(await self._workers.on_all(*newest, serving=True))

    async def _broadcast(self, version: int) -> dict[str, Value]:
        """From the trainer to all servers at once: neither here nor through the object store."""
        trainer = self._trainers[0]
        found = await self._workers.on_all("membership", serving=True)
        members = [member for member in found if member.server]  # no other is waited for
        servers = [member.server for member in members]
        if self._group is None or servers != self._members or {m.group for m in members} - {self._group.name}:
            opening = trainer.open_group.remote(self._trainer_host, len(members))
            await self._on_trainers("__ray_ready__")  # behind it
            self._group, self._buckets = await opening
            self._members = servers
        sending = [t.broadcast.remote(version) for t in self._trainers]
        offer = Offer(
            version=version,
            group=self._group,
            members=servers,
            ranks=self._config.rollout.sglang.tp,
            buckets=self._buckets,
            result=partial(_asked, "does not tell of its broadcast", sending[0]),
            weights=partial(_given, trainer, version, sending[0]),
        )
        newest = self._workers.newest = "receive_weights", offer
        taking = asyncio.ensure_future(self._workers.on_all(*newest, serving=True, return_exceptions=True))
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
        self._workers.newest = self._group = None  # of what was lost
        try:
            await asyncio.to_thread(self._start_trainers)
        except RayActorError as error:
            raise self._lost(self._trainers, "trainer_died", error=first_line(error)) from error

    async def rollout_metrics(self) -> dict[str, Value]:
        return reduce(await self._workers.on_all("metrics"))

    async def close(self) -> None:
        await asyncio.gather(*(close(actor, self._on_event) for actor in self._actors))
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
        for actor in self._actors:
            ray.kill(actor)

    @property
    def _actors(self) -> list[Any]:
        return [worker.actor for worker in self._workers.members] + self._trainers

    async def add_workers(self, count: int) -> list[int]:
        """More rollout workers; returns their numbers once they serve the newest weights.

        Raises ValueError where they have no place, RayError when one does not come up.
        """
        if self._pairs is not None or not self._workers.members:
            raise ValueError(
                f"cluster.share_gpus={self._config.cluster.share_gpus} and run.half={self._config.run.half}: "
                "workers join where each has a place of its own, in a run that plays."
            )
        needed = {"CPU": self._cpus_of_added, "GPU": self._options["num_gpus"]}
        free = ray.available_resources()
        if short := [name for name, each in needed.items() if each * count > free.get(name, 0)]:
            found = {name: free.get(name, 0) for name in short}
            raise ValueError(
                f"{count} more rollout workers need {needed} each, and Ray has {found} free: add fewer, or "
                "join machines to the Ray cluster first."
            )
        return await self._workers.join(count)

    async def drain_worker(self, number: int, grace: float) -> int:
        """Take a rollout worker out; see `Workers.leave`."""
        return await self._workers.leave(number, grace)

    def workers(self) -> list[dict[str, Any]]:
        """Every rollout worker: its number, what it plays, whether it leaves."""
        return [
            {"worker": one.number, "playing": one.load, "leaving": one.leaving}
            for one in self._workers.members
        ]

    def _spawn_rollout(self, n: int) -> Any:
        options = self._options | self._place(n)
        if n >= self._config.rollout.workers:
            options["num_cpus"] = self._cpus_of_added
        return ray.remote(RolloutWorker).options(**options).remote(self._config, n)

    @property
    def _cpus_of_added(self) -> int:
        """What a worker that joins reserves: a local Ray was started with what the first ones need."""
        return 1 if self._config.cluster.address else 0

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
        answers = [asyncio.ensure_future(answer_of(m.remote(*args))) for m in methods]
        try:
            return await asyncio.wait_for(asyncio.gather(*answers), seconds)
        except RayTaskError:  # of its own, or because another rank died: that is known a little later
            await asyncio.wait(answers, timeout=_GRACE_S)
            failed = [a.exception() for a in answers if a.done() and not a.cancelled()]
            if dead := next((e for e in failed if isinstance(e, RayActorError)), None):
                raise self._lost(ranks, "trainer_died", error=first_line(dead)) from dead
            raise
        except TimeoutError:
            raise self._lost(ranks, "trainer_hung", seconds=seconds, method=method) from None
        except RayActorError as error:
            raise self._lost(ranks, "trainer_died", error=first_line(error)) from error

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


def _pairs(count: int) -> PlacementGroup:
    """A GPU and two CPUs for each worker and its trainer rank. Raises ValueError where Ray has fewer."""
    needed = {"GPU": count, "CPU": 2 * count}
    there = ray.cluster_resources()
    if short := [name for name, amount in needed.items() if there.get(name, 0) < amount]:
        found = {name: there.get(name, 0) for name in short}
        raise ValueError(
            f"cluster.share_gpus=true with {count} workers needs {needed}, and Ray has {found}: lower "
            "rollout.workers and trainer.tp * trainer.cp * trainer.pp * trainer.dp, or set "
            "cluster.share_gpus=false."
        )
    return ray.util.placement_group([{"GPU": 1, "CPU": 2}] * count)


async def _asked(failing: str, answer: Any) -> Any:
    """Inside a rollout worker: the trainer's answer. Raises RuntimeError: its death is not the worker's."""
    try:
        return await answer
    except RayError as error:
        raise RuntimeError(f"the trainer {failing}: {first_line(error)}") from None


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
