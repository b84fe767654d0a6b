"""Clusters that write each batch to a dump, or read it from one, transparently for the controller.

    DumpingCluster:  train_step -> DUMP -> the wrapped cluster's train_step (no-op if run.half=rollout)
    ReplayCluster:   DUMP -> collect;  train_step -> the wrapped cluster's, compared with recorded metrics

Every other call goes to the wrapped cluster. Both get the number of the next step from calls of
`publish_weights`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.run import Config
from rlpipe.config.run_mode import RunMode
from rlpipe.diagnosis.probe import ProbeTable
from rlpipe.loop.cluster_protocol import Cluster
from rlpipe.loop.dump import Dump
from rlpipe.metrics.bus import observed
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Prompt, Trajectory

_CLOCKS = ("timing_s/", "perf/", "trace/", "spec/step_seconds/")  # metrics that differ between equal steps
_MAX_NAMES = 8  # metrics listed in an event


class _WrappedCluster(Cluster):
    """Passes every call to the wrapped cluster; subclasses change some. event: see `MetricsBus.event`."""

    def __init__(self, cluster: Cluster, dump: Dump, event: Callable[..., None]) -> None:
        self._cluster, self._dump, self._event = cluster, dump, event
        self._version = 0

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await self._cluster.collect(prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        return await self._cluster.evaluate(instance_ids, samples, temperature)

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        return await self._cluster.train_step(groups)

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        return await self._cluster.probe(trajectories)

    async def freeze_draft(self) -> None:
        await self._cluster.freeze_draft()

    async def publish_weights(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        self._version = version
        return await self._cluster.publish_weights(version)

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        return await self._cluster.save(directory)

    async def load(self, directory: Path) -> None:
        await self._cluster.load(directory)

    async def rebuild_trainer(self) -> None:
        await self._cluster.rebuild_trainer()

    async def rollout_metrics(self) -> dict[str, Value]:
        return await self._cluster.rollout_metrics()

    async def activity(self) -> list[str]:
        return await self._cluster.activity()

    async def close(self) -> None:
        await self._cluster.close()

    def kill(self) -> None:
        self._cluster.kill()


class DumpingCluster(_WrappedCluster):
    """Writes every batch before the trainer steps on it, and the trainer's metrics afterwards.

    needed: whether the dump is the purpose of the run. If so, a full disk ends the run; otherwise only the
    dump ends.
    """

    def __init__(self, cluster: Cluster, dump: Dump, *, needed: bool, event: Callable[..., None]) -> None:
        super().__init__(cluster, dump, event)
        self._needed, self._off = needed, False

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        step = self._version + 1
        await self._write(self._dump.write, step, groups)
        metrics = await super().train_step(groups)
        if metrics:
            await self._write(self._dump.trained, step, comparable(metrics))
        return metrics

    async def publish_weights(self, version: int) -> Callable[[], Awaitable[dict[str, Value]]]:
        if version <= self._version:  # the run went back to a checkpoint
            await asyncio.to_thread(self._dump.remove_after, version)
        return await super().publish_weights(version)

    async def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write to the dump in a thread. A failure ends the dump, and the run if the dump is `needed`."""
        if self._off:
            return
        try:
            await asyncio.to_thread(write, *arguments)
        except OSError as error:
            if self._needed:
                raise
            self._off = True
            self._event("recording_off", file=str(self._dump.directory), error=str(error))


class ReplayCluster(_WrappedCluster):
    """Returns the groups of a dump, and reports the first step at which the trainer's metrics differ.

    changed: settings of the trainer that differ from those of the recorded run.
    """

    def __init__(
        self, cluster: Cluster, dump: Dump, *, changed: Sequence[str], event: Callable[..., None]
    ) -> None:
        super().__init__(cluster, dump, event)
        self._changed = list(changed)
        self._equal_steps, self._differs = 0, False
        self._indices = {dump.prompt(n).group_id: n for n in range(dump.steps() * dump.batch)}

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await asyncio.to_thread(self._dump.group, self._indices[prompt.group_id])

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        step = self._version + 1
        recorded = self._dump.metrics(step)
        metrics = await super().train_step(groups)
        if recorded is not None:
            self._compare(step, recorded, comparable(metrics))
        return metrics

    async def close(self) -> None:
        if self._equal_steps and not self._differs:
            self._event("replay_equal", steps=self._equal_steps)
        await super().close()

    def _compare(self, step: int, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Compare the metrics of a step with the recorded ones; report the first step that differs."""
        names = sorted(n for n in recorded.keys() | current.keys() if recorded.get(n) != current.get(n))
        if not names:
            self._equal_steps += 1
        elif not self._differs:
            self._differs = True
            first = names[0]
            self._event(
                "replay_differs",
                step=step,
                equal=self._equal_steps,
                differing=len(names),
                names=names[:_MAX_NAMES],
                changed=self._changed,
                example=f"{first}: {recorded.get(first)} recorded, {current.get(first)} now",
            )


def with_dump(
    cluster: Cluster, dump: Dump, config: Config, *, event: Callable[..., None]
) -> DumpingCluster | ReplayCluster:
    """Wrap a cluster in one that reads its dump (run.half=train) or writes it."""
    run_mode = config.run.half
    if run_mode is RunMode.TRAIN:
        return ReplayCluster(cluster, dump, changed=dump.settings_changed(config), event=event)
    return DumpingCluster(cluster, dump, needed=run_mode is RunMode.ROLLOUT, event=event)


def comparable(metrics: Mapping[str, Value]) -> dict[str, Any]:
    """Return a trainer's metrics without clocks, exact as in JSON; NaN becomes text, to be comparable."""
    compared = {name: value for name, value in metrics.items() if not name.startswith(_CLOCKS)}
    return {name: str(value) if value != value else value for name, value in observed(compared)}
