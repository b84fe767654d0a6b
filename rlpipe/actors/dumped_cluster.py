"""Batches that go to a dump, or come from one, below a controller that notices nothing.

    DumpingCluster:  train_step -> DUMP -> the cluster's train_step (none with run.half=rollout)
    ReplayCluster:   DUMP -> collect;  train_step -> the cluster's, its metrics beside the recorded ones

Everything else is the cluster's. Both learn from `publish_weights` which step is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.config.run import Config
from rlpipe.config.run_mode import RunMode
from rlpipe.loop.cluster_protocol import Cluster
from rlpipe.loop.dump import Dump
from rlpipe.metrics.bus import observed
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Prompt

_OF_THE_MOMENT = ("timing_s/", "perf/", "trace/")
_NAMED = 8  # metrics an event lists


class DumpingCluster:
    """Writes every batch before the trainer sees it, and what the trainer told of it afterwards.

    event: as `MetricsBus.event`. needed: whether the run is about the dump: then a full disk ends it,
    otherwise the dump ends, and the run goes on.
    """

    def __init__(self, cluster: Cluster, dump: Dump, *, needed: bool, event: Callable[..., None]) -> None:
        self._cluster, self._dump, self._event = cluster, dump, event
        self._needed, self._version, self._off = needed, 0, False

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        step = self._version + 1
        await self._write(self._dump.write, step, groups)
        metrics = await self._cluster.train_step(groups)
        if metrics:
            await self._write(self._dump.trained, step, comparable(metrics))
        return metrics

    async def publish_weights(self, version: int) -> dict[str, Value]:
        if version <= self._version:  # the run went back to a checkpoint
            await asyncio.to_thread(self._dump.forget_after, version)
        self._version = version
        return await self._cluster.publish_weights(version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def _write(self, write: Callable[..., None], *what: Any) -> None:
        if self._off:
            return
        try:
            await asyncio.to_thread(write, *what)
        except OSError as error:
            if self._needed:
                raise
            self._off = True
            self._event("recording_off", file=str(self._dump.directory), error=str(error))


class ReplayCluster:
    """Hands out the groups of a dump, and says at which step the trainer first tells something else.

    event: as `MetricsBus.event`. changed: settings of the trainer that are not those of the recorded run.
    """

    def __init__(
        self, cluster: Cluster, dump: Dump, *, changed: Sequence[str], event: Callable[..., None]
    ) -> None:
        self._cluster, self._dump, self._event = cluster, dump, event
        self._version, self._changed = 0, list(changed)
        self._equal, self._differs = 0, False
        self._places = {self._dump.prompt(n).group_id: n for n in range(dump.steps() * dump.batch)}

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        return await asyncio.to_thread(self._dump.group, self._places[prompt.group_id])

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        step = self._version + 1
        recorded = self._dump.metrics(step)
        metrics = await self._cluster.train_step(groups)
        if recorded is not None:
            self._compare(step, recorded, comparable(metrics))
        return metrics

    async def publish_weights(self, version: int) -> dict[str, Value]:
        self._version = version
        return await self._cluster.publish_weights(version)

    async def close(self) -> None:
        if self._equal and not self._differs:
            self._event("replay_equal", steps=self._equal)
        await self._cluster.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def _compare(self, step: int, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        names = sorted(n for n in recorded.keys() | found.keys() if recorded.get(n) != found.get(n))
        if not names:
            self._equal += 1
        elif not self._differs:
            self._differs = True
            first = names[0]
            self._event(
                "replay_differs",
                step=step,
                equal=self._equal,
                differing=len(names),
                names=names[:_NAMED],
                changed=self._changed,
                example=f"{first}: {recorded.get(first)} recorded, {found.get(first)} now",
            )


def with_dump(
    cluster: Cluster, dump: Dump, config: Config, event: Callable[..., None]
) -> DumpingCluster | ReplayCluster:
    """A cluster that reads its dump (run.half=train) or writes it."""
    run_mode = config.run.half
    if run_mode is RunMode.TRAIN:
        return ReplayCluster(cluster, dump, changed=dump.settings_changed(config), event=event)
    return DumpingCluster(cluster, dump, needed=run_mode is RunMode.ROLLOUT, event=event)


def comparable(metrics: Mapping[str, Value]) -> dict[str, Any]:
    """What a trainer told, as JSON holds it exactly; without clocks. NaN is text and so equals itself."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_MOMENT)}
    return {name: str(value) if value != value else value for name, value in observed(kept)}
