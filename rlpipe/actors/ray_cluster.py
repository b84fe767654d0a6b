"""A run's processes as Ray actors: N rollout workers, tp * dp trainer ranks.

With cluster.share_gpus worker n and trainer rank n share a GPU; otherwise each has separate GPUs.

Owns the trainer's ranks and the publication of weights; `placement.py` reserves resources, `workers.py`
calls, replaces, adds and drains workers. Weights are passed to the workers as an object-store reference, or
the trainer sends them itself: its first rank to all SGLang servers at once
(rollout.sglang.weight_transfer=collective, ipc), or each rank to the server on its GPU (ipc with
cluster.share_gpus). When a trainer rank dies or hangs, all ranks are ended and `TrainerLost` is raised;
`rebuild_trainer` starts new ranks, which then load a checkpoint. With run.half=train there are no workers,
with run.half=rollout no ranks.

Does not import torch, because this process only starts the actors and does not use tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlpipe.actors.handles import Remote, RolloutHandle, TrainerHandle
from rlpipe.actors.placement import Placement
from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.actors.workers import Workers, close, first_line, wait_for_answer
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.loop.cluster_protocol import Cluster, TrainerLost
from rlpipe.metrics.values import Mean, Value, reduce
from rlpipe.preflight.object_store import check_store
from rlpipe.types import Group, Prompt, Trajectory

if TYPE_CHECKING:
    import torch

    from rlpipe.weights.buckets import Bucket
    from rlpipe.weights.offer import BroadcastResult, Member, Rendezvous

T = TypeVar("T")

# Concurrency groups of a rank: additional threads that work during its steps.
_WRITING = "writing"  # concurrency group that writes checkpoints
_SENDING = "sending"  # concurrency group that sends weights
_GRACE_S = 10.0  # limit for learning of a rank's death after another rank failed because of it


class _Group(NamedTuple):
    """The group of a trainer rank and the servers that it sends to, with the buckets of each version."""

    rendezvous: Rendezvous
    buckets: Sequence[Bucket]
    servers: list[str]


def hosts_and_gpus() -> tuple[int, bool]:
    """Return the number of hosts of the running Ray cluster, and whether any has a GPU."""
    return sum(node["Alive"] for node in ray.nodes()), bool(ray.cluster_resources().get("GPU"))


def check_places(config: Config, nodes: Sequence[Mapping[str, Any]], driver: str) -> None:
    """Refuse servers with more GPUs than any node, and batches that exceed a node's object store.

    nodes: result of `ray.nodes()`. driver: id of the node of this process. Raises ValueError.
    """
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    max_gpus = int(max((resources.get("GPU", 0) for resources in alive.values()), default=0))

    stores = {node: int(resources.get("object_store_memory", 0)) for node, resources in alive.items()}
    if stores.get(driver):
        check_store(config, stores[driver], min(filter(None, stores.values())))

    if config.run.half.generates and 0 < max_gpus < config.rollout.gpus_per_worker:
        raise ValueError(
            f"rollout.sglang.tp={config.rollout.sglang.tp}: a server runs on one node, and the largest "
            f"node of the Ray cluster has {max_gpus} GPUs. Set rollout.sglang.tp={max_gpus} or less; a model "
            "that does not fit into those needs nodes with larger GPUs."
        )


def check_capacity(config: Config, supply: Mapping[str, float]) -> None:
    """Refuse more workers and ranks than the cluster can run. supply: its CPU and GPU counts.

    Without this check Ray would wait forever. Pairs that share GPUs are checked when they are reserved.
    Raises ValueError.
    """
    if config.cluster.share_gpus:
        return

    workers = config.rollout.workers * config.run.half.generates
    ranks = config.trainer.world_size * config.run.half.trains
    per_worker = {"CPU": 1, "GPU": config.rollout.gpus_per_worker if supply.get("GPU") else 0}

    for name, each in per_worker.items():
        needed = workers * each + ranks * min(each, 1)
        if needed > supply.get(name, 0):
            raise ValueError(
                f"rollout.workers={workers} and {ranks} trainer ranks need {needed} {name}s ({each} for a "
                f"worker, {min(each, 1)} for a rank), and the Ray cluster has {supply.get(name, 0):g}: lower "
                "rollout.workers or the trainer's tp, cp, pp and dp, or join machines to the cluster first."
            )


class RayCluster(Cluster):
    """Implements `Cluster`; `launch` makes it after `ray.init`. on_event: gets failures (kind, fields)."""

    def __init__(self, config: Config, on_event: Callable[..., None]) -> None:
        self._config = config
        self._on_event = on_event
        run_mode = config.run.half
        check_capacity(config, ray.cluster_resources())
        check_places(config, ray.nodes(), ray.get_runtime_context().get_node_id())
        gpus: float = 1 if ray.cluster_resources().get("GPU") else 0
        if config.cluster.share_gpus:
            check_pairs(config.rollout.workers, ray.cluster_resources())
        self._places = Placement(config, gpus=bool(gpus))
        if config.cluster.share_gpus:
            gpus = 0.5
        self._options = {
            "num_cpus": 1,
            "num_gpus": gpus * config.rollout.gpus_per_worker,
            "max_concurrency": 1000,
        }
        # If the trainer broadcasts weights: its groups with servers, by rank.
        self._groups: dict[TrainerHandle, _Group] = {}

        threads = {_WRITING: 1, _SENDING: 1}
        self._trainer_options = {"num_cpus": 1, "num_gpus": gpus, "concurrency_groups": threads}
        self._trainers: list[TrainerHandle] = []

        # On a shared GPU a server measures the free memory at its start, so the trainer must start before it.
        if run_mode.trains and config.cluster.share_gpus:
            self._start_trainers()
        self._workers = Workers(
            config.cluster,
            self._spawn_rollout,
            count=config.rollout.workers * run_mode.generates,
            on_event=on_event,
        )
        if run_mode.trains and not config.cluster.share_gpus:
            self._start_trainers()

        # Return only when every engine has started.
        ray.get([worker.actor.metrics.remote() for worker in self._workers.members])

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await self._workers.call_least_loaded(lambda worker: worker.collect.remote(prompt, group_size))

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Divide the instances among the rollout workers, and return all trajectories."""

        async def evaluate(share: Sequence[str]) -> list[Trajectory]:
            return await self._workers.call_least_loaded(
                lambda worker: worker.evaluate.remote(share, samples, temperature)
            )

        count = len(self._workers.staying)
        shares = [list(instance_ids[n::count]) for n in range(count)]
        attempts = await asyncio.gather(*(evaluate(share) for share in shares if share))
        return [trajectory for share in attempts for trajectory in share]

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        if not self._config.run.half.trains:
            return {}
        batch = ray.put(groups)
        return (await self._call_ranks("step", lambda rank: rank.step.remote(batch)))[0]

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        rows = ray.put(trajectories)
        return (await self._call_ranks("probe", lambda rank: rank.probe.remote(rows)))[0]

    async def freeze_draft(self) -> None:
        await self._call_ranks("freeze_draft", lambda rank: rank.freeze_draft.remote())

    async def publish_weights(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        """Copy or export the newest weights; return a function that sends them to all workers."""
        started, send = time.monotonic(), None
        if self._workers.members and self._config.run.half.trains:
            send = await (self._copy if self._config.broadcasts_weights else self._export)(version)

        async def send_and_time() -> dict[str, Value]:
            if send is None:
                return {}
            async with self._workers.updating:
                metrics = await send()
            metrics["timing_s/update_weights"] = Mean(time.monotonic() - started, 1)
            return metrics

        return send_and_time

    async def _export(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        """Put weights into the object store, once for all workers; return a function that sends them."""
        exports = [rank.export.remote(version) for rank in self._trainers]
        exported = exports[0]  # other ranks export nothing

        # Wait until the export is done, without fetching the weights to this process.
        await self._call_ranks("export", lambda rank: rank.__ray_ready__.remote())

        async def send() -> dict[str, Value]:
            self._workers.newest = load = lambda worker: worker.update_weights.remote(exported)
            return reduce(await self._workers.call_all(load, serving=True))

        return send

    async def _copy(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        """Copy weights in the trainer, which sends them itself."""
        await self._call_ranks("copy_weights", lambda rank: rank.copy_weights.remote(version))
        return partial(self._broadcast, version)

    async def _broadcast(self, version: int) -> dict[str, Value]:
        """Send the trainer's copy to all servers directly, without this process or the object store."""
        from rlpipe.weights.offer import Offer

        answers = await self._workers.call_all(lambda worker: worker.membership.remote(), serving=True)
        members = [member for member in answers if member.server]  # do not wait for a server that is down

        # The first rank sends to all servers, or each rank sends to the server on its GPU.
        by_root = [members]
        if self._config.sends_from_every_rank:
            by_root = [[m for m in members if m.worker == rank] for rank in range(len(self._trainers))]
        roots = self._trainers[: len(by_root)]
        groups = await asyncio.gather(*map(self._group_of, roots, by_root))

        sending = [_on(_SENDING, root.broadcast).remote(version) for root in roots]
        offers = [
            Offer(
                version=version,
                group=group.rendezvous,
                members=group.servers,
                ranks=self._config.rollout.sglang.tp,
                buckets=group.buckets,
                result=partial(_answer_of_trainer, "does not report its broadcast", sent),
                weights=partial(_fetch_weights, root, version, sent),
            )
            for root, group, sent in zip(roots, groups, sending, strict=True)
        ]
        # A worker that joins later is in no group, and this version may have been replaced by then.
        newest = _on(_SENDING, roots[0].newest)
        self._workers.newest = lambda worker: worker.update_weights.remote(newest.remote())
        receiving = asyncio.ensure_future(
            self._workers.settle_all(lambda worker: worker.receive_weights.remote(offers), serving=True)
        )
        try:
            answers_of_roots = iter(sending)
            await self._call_ranks("broadcast", lambda _: next(answers_of_roots), of=roots)
        finally:  # if the trainer dies the workers fail too; its error is more precise, so raise it first
            results = await receiving

        metrics: list[dict[str, Value]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            metrics.append(result)
        return reduce(metrics)

    async def _group_of(self, root: TrainerHandle, members: Sequence[Member]) -> _Group:
        """Return a rank's group with these servers; make a new one if servers joined, left or restarted."""
        servers = [member.server for member in members]
        group = self._groups.get(root)
        if group is None or servers != group.servers or {m.group for m in members} - {group.rendezvous.name}:
            host = "127.0.0.1" if self._config.sends_from_every_rank else self._trainer_host
            opened = await self._call_ranks(
                "open_group",
                lambda rank: _on(_SENDING, rank.open_group).remote(host, len(servers)),
                of=[root],
            )
            self._groups[root] = group = _Group(*opened[0], servers)
        return group

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self._call_ranks("begin_save", lambda rank: rank.begin_save.remote(directory))

        async def write() -> None:
            await self._call_ranks("write_save", lambda rank: _on(_WRITING, rank.write_save).remote())
            await self._call_ranks("end_save", lambda rank: rank.end_save.remote())

        return write

    async def load(self, directory: Path) -> None:
        await self._call_ranks("load", lambda rank: rank.load.remote(directory))

    async def rebuild_trainer(self) -> None:
        self._workers.newest, self._groups = None, {}  # both belong to the lost trainer
        try:
            await asyncio.to_thread(self._start_trainers)
        except RayActorError as error:
            raise self._lost(self._trainers, "trainer_died", error=first_line(error)) from error

    async def rollout_metrics(self) -> dict[str, Value]:
        return reduce(await self._workers.call_all(lambda worker: worker.metrics.remote()))

    async def activity(self) -> list[str]:
        return await self._workers.activity()

    async def close(self) -> None:
        await asyncio.gather(*(close(actor, self._on_event) for actor in self._actors))
        self.kill()

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._places.close()

    @property
    def _actors(self) -> list[RolloutHandle | TrainerHandle]:
        return [*(worker.actor for worker in self._workers.members), *self._trainers]

    async def add_workers(self, count: int) -> list[int]:
        """Add rollout workers; return their numbers once they serve the newest weights.

        Raises ValueError if Ray has no capacity for them, RayError when one does not start.
        """
        if self._config.cluster.share_gpus or not self._workers.members:
            raise ValueError(
                f"cluster.share_gpus={self._config.cluster.share_gpus} and run.half={self._config.run.half}: "
                "workers join only a run that generates and shares no GPUs."
            )

        needed = {"CPU": self._cpus_of_added, "GPU": self._options["num_gpus"]}
        free = ray.available_resources()
        new = max(0, count - self._places.free)  # the other new workers use resources of drained workers
        if short := [name for name, each in needed.items() if each * new > free.get(name, 0)]:
            available = {name: free.get(name, 0) for name in short}
            raise ValueError(
                f"{count} more rollout workers need {needed} each, and Ray has {available} free: add fewer, "
                "or join machines to the Ray cluster first."
            )
        return await self._workers.join(count)

    async def drain_worker(self, number: int, grace: float) -> int:
        """Drain and remove a rollout worker; see `Workers.leave`."""
        repeated = await self._workers.leave(number, grace)
        self._places.leave(number)
        return repeated

    def workers(self) -> list[dict[str, Any]]:
        """List every rollout worker with its number, its load and whether it is leaving."""
        return [
            {"worker": member.number, "in_flight": member.load, "leaving": member.leaving}
            for member in self._workers.members
        ]

    def _spawn_rollout(self, number: int) -> RolloutHandle:
        place = self._places.of_worker(number)
        options = self._options | place
        if not place:
            options["num_cpus"] = self._cpus_of_added
        actor: Any = ray.remote(RolloutWorker).options(**options)
        return actor.remote(self._config, number)

    @property
    def _cpus_of_added(self) -> int:
        """Number of CPUs that a joining worker reserves; a local Ray has CPUs only for the first workers."""
        return 1 if self._config.cluster.address else 0

    def _start_trainers(self) -> None:
        """Start new ranks and connect them with one another."""
        world_size = self._config.trainer.world_size
        actor: Any = ray.remote(**self._trainer_options)(TrainerWorker)
        self._trainers = [
            actor.options(**self._places.of_rank(rank)).remote(self._config, rank, world_size)
            for rank in range(world_size)
        ]

        first: Any = self._trainers[0]
        on_many_hosts = bool(self._config.cluster.address)
        host = ray.get(first.__ray_call__.remote(_node_ip)) if on_many_hosts else "127.0.0.1"
        self._trainer_host = host
        master = ray.get(first.address.remote(host))
        starting: Any = [rank.start.remote(master) for rank in self._trainers]
        ray.get(starting)

    async def _call_ranks(
        self,
        name: str,
        call: Callable[[TrainerHandle], Awaitable[T]],
        *,
        of: Sequence[TrainerHandle] | None = None,
    ) -> list[T]:
        """Call every trainer rank and return the results.

        name: name of the call, for events and errors. of: the ranks to call; None for all.

        Raises TrainerLost when a rank dies, hangs, or was lost before.
        """
        if not self._trainers and self._config.run.half.trains:
            raise TrainerLost(f"{name}: the trainer was lost before")
        ranks = self._trainers
        timeout = self._config.cluster.hang_s or None
        called = ranks if of is None else of
        answers = [asyncio.ensure_future(wait_for_answer(call(rank))) for rank in called]
        try:
            return await asyncio.wait_for(asyncio.gather(*answers), timeout)
        except RayTaskError:
            # A rank may have failed because another one died; wait a little until the death is known.
            await asyncio.wait(answers, timeout=_GRACE_S)
            failures = [a.exception() for a in answers if a.done() and not a.cancelled()]
            if dead := next((e for e in failures if isinstance(e, RayActorError)), None):
                raise self._lost(ranks, "trainer_died", error=first_line(dead)) from dead
            raise
        except TimeoutError:
            raise self._lost(ranks, "trainer_hung", seconds=timeout, method=name) from None
        except RayActorError as error:
            raise self._lost(ranks, "trainer_died", error=first_line(error)) from error

    def _lost(self, ranks: list[TrainerHandle], kind: str, **fields: object) -> TrainerLost:
        """End the remaining ranks; only the first call that notices the loss reports it."""
        if self._trainers is ranks:
            self._on_event(kind, **fields)
            self._trainers = []
            for rank in ranks:
                ray.kill(rank)
        return TrainerLost(f"{kind}: {fields}")


def check_pairs(count: int, supply: Mapping[str, float]) -> None:
    """Refuse more pairs of worker and trainer rank than the cluster has GPUs. Raises ValueError."""
    needed = {"GPU": count, "CPU": 2 * count}
    if short := [name for name, amount in needed.items() if supply.get(name, 0) < amount]:
        available = {name: supply.get(name, 0) for name in short}
        raise ValueError(
            f"cluster.share_gpus=true with {count} workers needs {needed}, and Ray has {available}: lower "
            "rollout.workers and trainer.tp * trainer.cp * trainer.pp * trainer.dp, or set "
            "cluster.share_gpus=false."
        )


def _on(group: str, method: Remote[T]) -> Remote[T]:
    """Return a rank's method bound to one of its concurrency groups."""
    return method.options(concurrency_group=group)


async def _answer_of_trainer(failure: str, answer: Awaitable[T]) -> T:
    """Wait, inside a rollout worker, for the trainer's result.

    Raises RuntimeError instead of Ray's error, which would mean that the worker itself died. failure: message
    of the RuntimeError.
    """
    try:
        return await answer
    except RayError as error:
        raise RuntimeError(f"the trainer {failure}: {first_line(error)}") from None


async def _fetch_weights(
    trainer: TrainerHandle, version: int, broadcast: Awaitable[BroadcastResult | None]
) -> Mapping[str, torch.Tensor]:
    """Fetch published weights from the trainer's memory, inside a rollout worker, if its server missed them.

    broadcast: result of their broadcast, which must end first.
    """
    from rlpipe.weights.payload import unpack_weights

    failure = f"does not give out version {version}"
    await _answer_of_trainer(failure, broadcast)
    payload = await _answer_of_trainer(failure, _on(_SENDING, trainer.newest).remote())
    if payload.version != version:
        raise RuntimeError(f"the trainer {failure}: it holds version {payload.version}.")
    return unpack_weights(payload)


def _node_ip(_: object) -> str:
    """Return the address of the machine on which this actor runs."""
    return ray.util.get_node_ip_address()
