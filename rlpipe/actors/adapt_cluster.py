"""The processes of an adaptation with `cluster=ray`: ranks that train a draft, and rollout workers.

All are Ray actors. The workers record rollouts before training and have ended when it begins. A worker that
dies is replaced and its prompts are rolled out again, as in RL (`workers.py`). When a rank dies the run ends;
the next start continues from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError

from rlpipe.actors.handles import AdaptHandle
from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.workers import Workers, close, first_line
from rlpipe.config.run import Config
from rlpipe.metrics.values import Value
from rlpipe.trainer.runtime import open_address
from rlpipe.types import CONTINUES, Group, Prompt, RunStopped
from rlpipe.weights.payload import WeightPayload, pack_weights, unpack_weights

if TYPE_CHECKING:
    import torch

    from rlpipe.batching.micro_batch import PackedBatch
    from rlpipe.drafts.loss.stats import MtpStats
    from rlpipe.drafts.tables import Table
    from rlpipe.trainer.megatron import MegatronTrainer

T = TypeVar("T")
MakeTrainer = Callable[..., "MegatronTrainer"]  # arguments: rank, world_size, master


def _gpus() -> int:
    return 1 if ray.cluster_resources().get("GPU") else 0


class AdaptRank:
    """Trainer rank `rank` of `world_size`; every method except `host` and `address` is collective."""

    def __init__(self, make: MakeTrainer, rank: int, world_size: int) -> None:
        self._make, self._rank, self._world_size = make, rank, world_size

    def host(self) -> str:
        """Return the address of this rank's machine."""
        return ray.util.get_node_ip_address()

    def address(self, host: str) -> str:
        """Return the address at which this rank, which must be the first, waits for the other ranks."""
        return open_address(host, world_size=self._world_size)

    def start(self, master: str) -> bool:
        """Build the model and join the other ranks; return whether siblings may share prefixes."""
        self._trainer = self._make(rank=self._rank, world_size=self._world_size, master=master)
        return self._trainer.shares_prefixes

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Take an optimizer step."""
        return self._trainer.adapt_step(batch)

    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Compute statistics of the draft."""
        return self._trainer.mtp_stats(batch)

    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Tabulate draft and target."""
        return self._trainer.draft_tables(batch)

    def save(self, directory: Path) -> None:
        """Save the trainer's state."""
        self._trainer.save(directory)

    def save_hf(self, directory: Path) -> None:
        """Save the Hugging Face checkpoint."""
        self._trainer.save_hf(directory)

    def load(self, directory: Path) -> None:
        """Load the trainer's state."""
        self._trainer.load(directory)

    def export(self) -> WeightPayload | None:
        """Return the full weights on rank 0, None on other ranks."""
        weights = self._trainer.export_weights()
        return pack_weights(weights, 0) if weights is not None and self._rank == 0 else None


class TrainerRanks:
    """Several ranks with the interface of a single trainer of drafts: every call goes to all ranks.

    make: builds a rank's trainer from rank, world_size and master; it must be importable by name. Calls raise
    RunStopped when a rank dies.
    """

    def __init__(self, config: Config, make: MakeTrainer) -> None:
        count = config.trainer.world_size
        actor: Any = ray.remote(num_cpus=1, num_gpus=_gpus())(AdaptRank)
        self._ranks: list[AdaptHandle] = [actor.remote(make, rank, count) for rank in range(count)]
        first = self._ranks[0]
        on_many_hosts = bool(config.cluster.address)
        try:
            host = _get(first.host.remote()) if on_many_hosts else "127.0.0.1"
            master = _get(first.address.remote(host))
            self.shares_prefixes: bool = self._call_ranks(lambda rank: rank.start.remote(master))[0]
        except BaseException:
            self.close()
            raise

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Take an optimizer step of the draft on a batch; return its metrics."""
        shared = ray.put(batch)
        return self._call_ranks(lambda rank: rank.adapt_step.remote(shared))[0]

    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Compute teacher-forced statistics of the draft; the trainer's state does not change."""
        shared = ray.put(batch)
        return self._call_ranks(lambda rank: rank.mtp_stats.remote(shared))[0]

    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Tabulate draft and target at every context; see `MegatronTrainer.draft_tables`."""
        shared = ray.put(batch)
        return self._call_ranks(lambda rank: rank.draft_tables.remote(shared))[0]

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of target and draft under HF names, on the CPU."""
        payload = self._call_ranks(lambda rank: rank.export.remote())[0]
        assert payload is not None, "rank 0 exports the weights"
        return unpack_weights(payload)

    def save(self, directory: Path) -> None:
        """Save all state that a resumed run needs."""
        self._call_ranks(lambda rank: rank.save.remote(directory))

    def save_hf(self, directory: Path) -> None:
        """Save the checkpoint that engines load."""
        self._call_ranks(lambda rank: rank.save_hf.remote(directory))

    def load(self, directory: Path) -> None:
        """Load a checkpoint that `save` wrote, possibly with another number of ranks."""
        self._call_ranks(lambda rank: rank.load.remote(directory))

    def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            ray.kill(rank)

    def _call_ranks(self, call: Callable[[AdaptHandle], Awaitable[T]]) -> list[T]:
        return _get([call(rank) for rank in self._ranks])


def _get(answers: Any) -> Any:
    try:
        return ray.get(answers)
    except RayActorError as error:
        raise RunStopped(f"a rank of the trainer died ({first_line(error)}). {CONTINUES}") from error


@asynccontextmanager
async def recording(
    config: Config, on_event: Callable[..., None]
) -> AsyncIterator[Callable[[Prompt, int], Awaitable[Group]]]:
    """Yield a function that rolls out a prompt's group on the least loaded of `rollout.workers` engines."""
    rollout = config.rollout
    config = replace(config, metrics=replace(config.metrics, rollouts_per_step=0))  # do not record drafts
    options = {"num_cpus": 1, "num_gpus": _gpus() * rollout.gpus_per_worker, "max_concurrency": 1000}
    actor: Any = ray.remote(**options)(RolloutWorker)
    workers = Workers(
        config.cluster, lambda n: actor.remote(config, n), count=rollout.workers, on_event=on_event
    )

    async def collect(prompt: Prompt, group_size: int) -> Group:
        return await workers.call_least_loaded(lambda worker: worker.collect.remote(prompt, group_size))

    try:
        yield collect
    finally:
        await asyncio.gather(*(close(member.actor, on_event) for member in workers.members))
        for member in workers.members:
            ray.kill(member.actor)
