"""The processes of an adaptation with `cluster=ray`: ranks that train a draft, workers that record rollouts.

Both are Ray actors, one after the other: no worker lives while a draft is trained. A worker that dies is
replaced and its prompts are played again, as in RL (`workers.py`). When a rank dies the run ends, and the
next one continues from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.workers import Workers, close, first_line
from rlpipe.config.run import Config
from rlpipe.metrics.values import Value
from rlpipe.trainer.runtime import open_address
from rlpipe.types import Group, Prompt, RunStopped
from rlpipe.weights.payload import WeightPayload, pack_weights, unpack_weights

if TYPE_CHECKING:
    import torch

    from rlpipe.batching.micro_batch import PackedBatch
    from rlpipe.drafts.loss.stats import MtpStats
    from rlpipe.trainer.megatron import MegatronTrainer

MakeTrainer = Callable[..., "MegatronTrainer"]  # of rank, world_size, master


def _gpus() -> int:
    return 1 if ray.cluster_resources().get("GPU") else 0


class AdaptRank:
    """Rank `rank` of `world_size`; every method but `address` is collective."""

    def __init__(self, make: MakeTrainer, rank: int, world_size: int) -> None:
        self._make, self._rank, self._world_size = make, rank, world_size

    def host(self) -> str:
        """The address of this rank's machine."""
        return ray.util.get_node_ip_address()

    def address(self, host: str) -> str:
        """Where this rank, the first, waits for the others."""
        return open_address(host, world_size=self._world_size)

    def start(self, master: str) -> bool:
        """Build the model and join the other ranks; returns whether it shares prefixes of siblings."""
        self._trainer = self._make(rank=self._rank, world_size=self._world_size, master=master)
        return self._trainer.shares_prefixes

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the trainer returns."""
        return getattr(self._trainer, method)(*args)

    def export(self) -> WeightPayload | None:
        """Full weights; None off rank 0."""
        weights = self._trainer.export_weights()
        return pack_weights(weights, 0) if weights is not None and self._rank == 0 else None


class TrainerRanks:
    """Several ranks in the place of one trainer of drafts: what an adaptation asks of it, asked of all.

    make: builds a rank's trainer from rank, world_size and master; importable by name. Raises RunStopped when
    a rank dies.
    """

    def __init__(self, config: Config, make: MakeTrainer) -> None:
        count = config.trainer.world_size
        actor = ray.remote(num_cpus=1, num_gpus=_gpus())(AdaptRank)
        self._ranks = [actor.remote(make, rank, count) for rank in range(count)]
        first = self._ranks[0]
        several = bool(config.cluster.address)
        try:
            host = self._get(first.host.remote()) if several else "127.0.0.1"
            master = self._get(first.address.remote(host))
            self.shares_prefixes: bool = self._all("start", master)[0]
        except BaseException:
            self.close()
            raise

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Optimizer steps of the draft on a batch."""
        return self._all("call", "adapt_step", ray.put(batch))[0]

    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Teacher-forced statistics of the draft; changes nothing."""
        return self._all("call", "mtp_stats", ray.put(batch))[0]

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Target and draft under HF names, on the CPU."""
        return unpack_weights(self._all("export")[0])

    def save(self, directory: Path) -> None:
        """Everything a resumed run needs."""
        self._all("call", "save", directory)

    def save_hf(self, directory: Path) -> None:
        """What engines load."""
        self._all("call", "save_hf", directory)

    def load(self, directory: Path) -> None:
        """Continue from `save`, whatever number of ranks wrote it."""
        self._all("call", "load", directory)

    def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            ray.kill(rank)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._get([getattr(rank, method).remote(*args) for rank in self._ranks])

    def _get(self, answers: Any) -> Any:
        try:
            return ray.get(answers)
        except RayActorError as error:
            raise RunStopped(
                f"a rank of the trainer died ({first_line(error)}). Run again, it continues from the newest "
                "checkpoint."
            ) from error


@asynccontextmanager
async def recording(
    config: Config, on_event: Callable[..., None]
) -> AsyncIterator[Callable[[Prompt, int], Awaitable[Group]]]:
    """A function that plays a prompt's group on the least loaded of `rollout.workers` engines."""
    rollout = config.rollout
    config = replace(config, metrics=replace(config.metrics, rollouts_per_step=0))  # nobody reads the drafts
    worker = ray.remote(num_cpus=1, num_gpus=_gpus() * rollout.cards, max_concurrency=1000)(RolloutWorker)
    workers = Workers(config.cluster, lambda n: worker.remote(config, n), on_event, rollout.workers)
    try:
        yield partial(workers.on_some, "collect")
    finally:
        await asyncio.gather(*(close(one.actor, on_event) for one in workers.members))
        for one in workers.members:
            ray.kill(one.actor)
