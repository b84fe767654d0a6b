"""The whole graph in one process: the engine decodes in its thread, the trainer steps in another.

For debuggers and for a bare machine without Ray; same workers, same controller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.metrics.values import Mean, Value
from rlpipe.types import Group, Prompt, Trajectory


class InlineCluster:
    """One rollout worker, one trainer rank; all trainer calls run on one thread. A half lacks the other one.

    on_event: told of every fault (kind, fields).
    """

    def __init__(self, config: Config, on_event: Callable[..., None]) -> None:
        self._on_event = on_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._trainer = self._rollout = None
        if config.run.half.trains:
            self._trainer = TrainerWorker(config)
            self._thread.submit(self._trainer.start).result()
        if config.run.half.generates:
            self._rollout = RolloutWorker(config)

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await self._rollout.collect(prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        return await self._rollout.evaluate(instance_ids, samples, temperature)

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        return {} if self._trainer is None else await self._train(self._trainer.step, groups)

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        return await self._train(self._trainer.probe, trajectories)

    async def freeze_draft(self) -> None:
        await self._train(self._trainer.freeze_draft)

    async def publish_weights(self, version: int) -> dict[str, Value]:
        if self._rollout is None or self._trainer is None:
            return {}
        started = time.monotonic()
        payload = await self._train(self._trainer.export, version)
        metrics = await self._told(self._rollout.update_weights(payload))
        metrics["timing_s/update_weights"] = Mean(time.monotonic() - started, 1)
        return metrics

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        if self._trainer is None:
            return _nothing
        await self._train(self._trainer.begin_save, directory)

        async def write() -> None:
            await asyncio.to_thread(self._trainer.write_save)
            await self._train(self._trainer.end_save)

        return write

    async def load(self, directory: Path) -> None:
        if self._trainer is not None:
            await self._train(self._trainer.load, directory)

    async def rollout_metrics(self) -> dict[str, Value]:
        return {} if self._rollout is None else await self._told(self._rollout.metrics())

    async def close(self) -> None:
        if self._rollout is not None:
            await self._rollout.close()
        if self._trainer is not None:
            await self._train(self._trainer.close)
        self._thread.shutdown()

    async def rebuild_trainer(self) -> None:
        """Its trainer is never lost alone: it lives in this process."""

    def kill(self) -> None:
        """Nothing outlives this process."""

    async def _told(self, asked: Awaitable[dict[str, Value]]) -> dict[str, Value]:
        """What the rollout worker answers; and tell of the faults it knows of."""
        try:
            return await asked
        finally:
            for kind, fields in await self._rollout.take_events():
                self._on_event(kind, **fields)

    async def _train(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


async def _nothing() -> None:
    """Without a trainer there is nothing to write."""
