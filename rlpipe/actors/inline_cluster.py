"""All components in one process: the engine decodes in its thread, the trainer steps in another.

It is for debuggers and machines without Ray. Workers and controller are the same as in a Ray cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.config.openmp import release_threads
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.loop.cluster_protocol import Cluster
from rlpipe.metrics.values import Mean, Value
from rlpipe.types import Group, Prompt, Trajectory

P = ParamSpec("P")
T = TypeVar("T")


class InlineCluster(Cluster):
    """A cluster with one rollout worker and one trainer rank, or only one of the two with `run.half`.

    All calls of the trainer run on one thread, except the writing of checkpoints. on_event: called for every
    failure (kind, fields).
    """

    def __init__(self, config: Config, on_event: Callable[..., None]) -> None:
        self._on_event = on_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._trainer: TrainerWorker | None = None
        self._rollout: RolloutWorker | None = None
        if config.run.half.trains:
            self._trainer = trainer = TrainerWorker(config)
            self._thread.submit(_then_idle, trainer.start).result()
        if config.run.half.generates:
            self._rollout = RolloutWorker(config)

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        assert self._rollout is not None, "run.half=train has no rollout worker"
        return await self._rollout.collect(prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        assert self._rollout is not None, "run.half=train has no rollout worker"
        return await self._rollout.evaluate(instance_ids, samples, temperature)

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        return {} if self._trainer is None else await self._on_trainer_thread(self._trainer.step, groups)

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        assert self._trainer is not None, "run.half=rollout has no trainer"
        return await self._on_trainer_thread(self._trainer.probe, trajectories)

    async def freeze_draft(self) -> None:
        assert self._trainer is not None, "run.half=rollout has no trainer"
        await self._on_trainer_thread(self._trainer.freeze_draft)

    async def publish_weights(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        """Export the newest weights; the returned coroutine loads them into the engine."""
        started, rollout, payload = time.monotonic(), self._rollout, None
        if rollout is not None and self._trainer is not None:
            payload = await self._on_trainer_thread(self._trainer.export, version)

        async def send() -> dict[str, Value]:
            if rollout is None or payload is None:
                return {}
            metrics = await self._report_events(rollout, rollout.update_weights(payload))
            metrics["timing_s/update_weights"] = Mean(time.monotonic() - started, 1)
            return metrics

        return send

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Copy the trainer's state; the returned coroutine writes it."""
        trainer = self._trainer
        if trainer is not None:
            await self._on_trainer_thread(trainer.begin_save, directory)

        async def write() -> None:
            if trainer is not None:
                await asyncio.to_thread(trainer.write_save)
                await self._on_trainer_thread(trainer.end_save)

        return write

    async def load(self, directory: Path) -> None:
        if self._trainer is not None:
            await self._on_trainer_thread(self._trainer.load, directory)

    async def rollout_metrics(self) -> dict[str, Value]:
        if self._rollout is None:
            return {}
        return await self._report_events(self._rollout, self._rollout.metrics())

    async def activity(self) -> list[str]:
        return [] if self._rollout is None else [await self._rollout.activity()]

    async def close(self) -> None:
        if self._rollout is not None:
            await self._rollout.close()
        if self._trainer is not None:
            await self._on_trainer_thread(self._trainer.close)
        self._thread.shutdown()

    async def rebuild_trainer(self) -> None:
        """Do nothing, because the trainer runs in this process and is never lost without the run."""

    def kill(self) -> None:
        """Do nothing, because no component outlives this process."""

    async def _report_events(self, rollout: RolloutWorker, answer: Awaitable[T]) -> T:
        """Wait for a rollout worker's result, then report the failures that its engines recorded."""
        try:
            return await answer
        finally:
            for kind, fields in await rollout.take_events():
                self._on_event(kind, **fields)

    async def _on_trainer_thread(
        self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(_then_idle, function, *arguments, **options))


def _then_idle(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function on a thread that computes nothing afterwards."""
    try:
        return function(*arguments, **options)
    finally:
        release_threads()
