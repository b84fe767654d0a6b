"""The async loop: rollout and training at the same time, staleness bounded.

    PromptStream --> _roll --> cluster.collect --> GroupBuffer --> _train --> publish --> gate.advance
                       ^ waits: StalenessGate        waits: take(n) in order                   |
                       +---------------------------- wakes ------------------------------------+

| who    | waits for                              | woken by                          |
| _roll  | the gate to admit group n              | `gate.advance` after a publish    |
| _train | the next `prompts_per_step` groups     | a `_collect` task's `buffer.put`  |
| stop   | the step in progress                   | `request_stop` (Ctrl-C)           |

Synchronous training is the same code with max_staleness = 0. Owns the loop and nothing else: where
components run is the cluster's business, what a step does is the trainer's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlpipe.config.run import Config
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.collect import trajectory_metrics, validation_metrics
from rlpipe.metrics.report import write_report
from rlpipe.metrics.values import Last, Mean, Value
from rlpipe.pipeline.checkpoints import CheckpointStore
from rlpipe.pipeline.group_buffer import GroupBuffer
from rlpipe.pipeline.ledger import Ledger
from rlpipe.pipeline.prompts import PromptStream
from rlpipe.pipeline.staleness import StalenessGate
from rlpipe.types import Group, Prompt, Trajectory

T = TypeVar("T")


class Cluster(Protocol):
    """Where the components run; `actors/ray_cluster.py` and `actors/inline_cluster.py` implement it."""

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Play one prompt's group on some rollout worker."""
        ...

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Play held-out instances with the weights now served."""
        ...

    async def train_step(self, groups: list[Group]) -> dict[str, Value]:
        """One optimizer step on all trainer ranks."""
        ...

    async def publish_weights(self, version: int) -> dict[str, Value]:
        """Trainer weights, target and draft, to every engine; they serve `version` on return."""
        ...

    async def save(self, directory: Path) -> None:
        """Trainer state and an HF checkpoint into a directory."""
        ...

    async def load(self, directory: Path) -> None:
        """Trainer state from a checkpoint directory."""
        ...

    async def rollout_metrics(self) -> dict[str, Value]:
        """Engine counters since the last call."""
        ...

    async def close(self) -> None:
        """Stop every component."""
        ...


@dataclass(slots=True, kw_only=True)
class Controller:
    """One run. `held_out` maps split name to the instances validated; the first is the primary one."""

    config: Config
    run_dir: Path
    cluster: Cluster
    prompts: PromptStream
    held_out: dict[str, list[str]]
    bus: MetricsBus
    ledger: Ledger
    checkpoints: CheckpointStore
    version: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _gate: StalenessGate = field(init=False)
    _buffer: GroupBuffer = field(init=False)

    async def run(self) -> None:
        """Train until `run.steps` or a stop request; always leaves a checkpoint of the last step."""
        await self._resume()
        sizes = self.config.pipeline
        self._gate = StalenessGate(
            max_staleness=sizes.max_staleness, groups_per_step=sizes.prompts_per_step, version=self.version
        )
        self._buffer = GroupBuffer(first=self.version * sizes.prompts_per_step)
        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(self._roll())
            await self._train()
            rolling.cancel()
        if dropped := self.ledger.drop_unfinished("run ended"):
            self.bus.event("prompts_dropped", count=dropped, reason="run ended")
        if self.version not in self.checkpoints.steps():
            await self._save()

    def request_stop(self) -> None:
        """Finish the step in progress, checkpoint, return from `run`."""
        self._stop.set()

    async def _roll(self) -> None:
        """Admit groups in order, as many as staleness allows; each runs as a task of its own."""
        first = self.version * self.config.pipeline.prompts_per_step
        last = self.config.run.steps * self.config.pipeline.prompts_per_step
        async with asyncio.TaskGroup() as collecting:
            for index in range(first, last):
                await self._gate.admit(index)
                prompt = self.prompts[index]
                self.ledger.admitted(index, prompt, self._gate.version)
                collecting.create_task(self._collect(index, prompt))

    async def _collect(self, index: int, prompt: Prompt) -> None:
        group = await self.cluster.collect(prompt, self.config.pipeline.group_size)
        self.ledger.completed(group)
        await self._buffer.put(index, group)

    async def _train(self) -> None:
        """The training loop: take a batch, step, publish, open the gate."""
        settings = self.config.run
        if self.version == 0:
            await self._validate()
            self.bus.commit(0)
        while self.version < settings.steps:
            started = time.monotonic()
            groups = await self._unless_stopped(self._buffer.take(self.config.pipeline.prompts_per_step))
            if groups is None:
                return
            waited = time.monotonic() - started
            metrics = trajectory_metrics(groups, self.version)
            self._record_trajectories(groups[0])
            metrics |= await self.cluster.train_step(groups)
            self.version += 1
            self.ledger.trained(groups, self.version)
            metrics |= await self.cluster.publish_weights(self.version)
            await self._gate.advance(self.version)
            metrics |= await self.cluster.rollout_metrics()
            seconds = time.monotonic() - started
            metrics |= _step_metrics(groups, self.version, seconds, waited)
            self.bus.emit(self.version, metrics)
            if self._due(self.config.val.every):
                await self._validate()
            if self._due(settings.save_every):
                self.bus.emit(self.version, {"timing_s/save_checkpoint": Mean(await self._save(), 1)})
            self.bus.commit(self.version)
            report_every = self.config.metrics.report_every
            if report_every and self.version % report_every == 0:
                await asyncio.to_thread(write_report, [self.run_dir], self.run_dir / "report.html")

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps is due; after the last step it always is."""
        return self.version == self.config.run.steps or bool(every and self.version % every == 0)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None as soon as a stop was requested."""
        working = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        stopping = self._stop.is_set()
        for future in (working, stop):
            if stopping or not future.done():
                future.cancel()
        return None if stopping else working.result()

    async def _validate(self) -> None:
        """Reward on the held-out sets at the current version, reported under the current step."""
        settings = self.config.val
        if not settings.every:
            return
        started = time.monotonic()
        metrics: dict[str, Value] = {}
        self.bus.event("phase", message=f"validating version {self.version}")
        for number, (split, ids) in enumerate(self.held_out.items()):
            played = await self._unless_stopped(
                self.cluster.evaluate(ids, settings.samples, settings.temperature)
            )
            if played is None:
                return
            metrics |= validation_metrics(split, played, primary=number == 0)
        metrics["timing_s/validate"] = Mean(time.monotonic() - started, 1)
        self.bus.emit(self.version, metrics)

    async def _save(self) -> float:
        """Write the checkpoint of this version; returns the seconds it took."""
        started = time.monotonic()
        state: dict[str, Any] = {"recipe": self.config.recipe, "seed": self.config.run.seed}
        path = await self.checkpoints.save(self.version, state, self.cluster.save)
        seconds = time.monotonic() - started
        self.bus.event("checkpoint", step=self.version, path=path.name, seconds=round(seconds, 3))
        return seconds

    async def _resume(self) -> None:
        """Continue from the newest checkpoint, if the run directory has one."""
        found = self.checkpoints.newest()
        if found is None:
            return
        path, state = found
        await self.cluster.load(path)
        self.version = int(state["step"])
        self.ledger.rewind(self.version * self.config.pipeline.prompts_per_step)
        await self.cluster.publish_weights(self.version)
        self.bus.event("resumed", step=self.version, path=path.name)

    def _record_trajectories(self, group: Group) -> None:
        """One group a step, readable, for the trajectory viewer."""
        with (self.run_dir / "trajectories.jsonl").open("a") as file:
            for trajectory in group.trajectories:
                record = {
                    "step": self.version + 1,
                    "instance_id": trajectory.instance_id,
                    "reward": trajectory.reward,
                    "turns": trajectory.info.get("turns", []),
                }
                file.write(json.dumps(record) + "\n")


def _step_metrics(groups: list[Group], version: int, seconds: float, waited: float) -> dict[str, Value]:
    """What only the loop knows: the clock of the step."""
    tokens = sum(len(t.token_ids) for g in groups for t in g.trajectories)
    return {
        "training/global_step": Last(version),
        "timing_s/step": Mean(seconds, 1),
        "timing_s/wait_rollout": Mean(waited, 1),
        "timing_s/gen": Mean(sum(g.gen_seconds for g in groups), len(groups)),
        "timing_s/sandbox": Mean(sum(g.env_seconds for g in groups), len(groups)),
        "perf/time_per_step": Mean(seconds, 1),
        "perf/total_num_tokens": Last(tokens),
        "perf/throughput": Mean(tokens / seconds, 1),
    }
