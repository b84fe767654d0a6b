"""The async loop: rollout and training run at the same time, with bounded staleness.

One task admits prompts and collects their groups; another trains on batches of finished groups and publishes
each new version. With max_staleness = 0 the same code is synchronous training.

    admit_next -> cluster.collect -> finished -> take_batch -> train_step -> publish_weights -> open_gate
        ^        (_generate_groups)                       (_train)            (_bring_weights)      |
        +---------------------------- a new version opens the gate ---------------------------------+

A version is copied before the next step begins, and sent while that step trains:

    _train           train 1 | copy 1 | train 2           | copy 2 | train 3
    _bring_weights           .        | send 1, gate    |          | send 2, gate    |

| loop               | waits for                                | woken by                                  |
|--------------------|------------------------------------------|-------------------------------------------|
| `_generate_groups` | a slot for group n (staleness gate)      | `backlog.open_gate`, or a dropped group   |
| `_train`           | the next `prompts_per_step` groups       | `backlog.finished` of a `_collect` task   |
| `_train`           | the previous version to be served        | `_bring_weights`                          |
| a save             | the checkpoint that is being written     | its writer, which runs during the steps   |
| the end of the run | the step in progress                     | `request_stop` (Ctrl-C), or the last step |

When the trainer is lost, the cluster starts another, and the loop begins again like a resumed run: from the
newest checkpoint and its ledger. Owns only the loop: the cluster decides where components run, and the
trainer decides what a step does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlpipe.config.run import Config
from rlpipe.diagnosis.monitor import Monitor
from rlpipe.loop.backlog import Backlog
from rlpipe.loop.checkpoint_writer import Saving
from rlpipe.loop.checkpoints import SCORE, CheckpointStore
from rlpipe.loop.cluster_protocol import Cluster, TrainerLost
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.masked import MaskedAttempts
from rlpipe.loop.prompts import PromptStream
from rlpipe.loop.worker_scaling import Growth
from rlpipe.metrics.bus import NO_SPACE, MetricsBus
from rlpipe.metrics.collect import InfoMetrics, member_metrics, trajectory_metrics, validation_metrics
from rlpipe.metrics.jsonl import truncate_records
from rlpipe.metrics.samples import first_sample
from rlpipe.metrics.spans import Lane, SpanLog
from rlpipe.metrics.values import Last, Mean, Value
from rlpipe.report.write import write_report
from rlpipe.types import CONTINUES, Group, Prompt, RunStopped

T = TypeVar("T")

# Span of the controller -> text about what it waits for.
_WAITS = {
    "wait": "groups to train on",
    "probe": "the probe of the draft",
    "train": "the training step",
    "sync": "the engines to load new weights",
    "validate": "the validation",
}


@dataclass(slots=True, kw_only=True)
class Controller:
    """The loop of one run. held_out: split name -> instances to validate on; the first is primary."""

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
    _backlog: Backlog = field(init=False)
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _saves: Saving = field(init=False)
    _masked: MaskedAttempts = field(init=False)
    _lost: int = field(default=0, init=False)  # trainers lost so far
    _traveling: asyncio.Task[dict[str, Value]] | None = field(default=None, init=False)
    _draft_frozen: bool = field(default=False, init=False)
    _spans: SpanLog = field(default_factory=lambda: SpanLog("controller"), init=False)
    _lane: Lane = field(init=False)
    _monitor: Monitor = field(init=False)
    _info: InfoMetrics = field(init=False)
    growth: Growth = field(init=False)

    def __post_init__(self) -> None:
        self.growth = Growth(self.config.rollout.workers, self.config.cluster.max_workers)
        self._lane = Lane(self._spans, 0)
        self._saves = Saving(
            config=self.config,
            cluster=self.cluster,
            store=self.checkpoints,
            ledger=self.ledger,
            event=self.bus.event,
            spans=self._spans,
        )
        self._monitor = Monitor(self.config, self.run_dir, self.bus.event)
        self._info = InfoMetrics(self.bus.event)
        run = self.config.run
        self._masked = MaskedAttempts(run.max_masked_share, run.masked_window, self.bus.event)

    async def run(self) -> None:
        """Train until `run.steps` or a stop request, and save a checkpoint of the last step.

        Raises RunStopped when a rule ends the run: too many masked attempts or restarts of the trainer.
        """
        while True:
            lost: BaseExceptionGroup | None = None
            try:
                await self._run()
            except* TrainerLost as caught:
                lost = caught
            finally:
                await self._saves.settled()

            # A lost trainer is rebuilt, and the loop starts again from the newest checkpoint.
            if lost is None:
                break
            await self._recover(lost)

        if self._stop_reason:
            raise RunStopped(self._stop_reason)

    @property
    def _stop_reason(self) -> str | None:
        """The reason to stop before the last step, if too many attempts were masked, else None."""
        return self._masked.stop_reason if self.version < self.config.run.steps else None

    async def _run(self) -> None:
        """Run from the newest checkpoint to the last step or a stop."""
        self.version, finished = await self._saves.resume(served=bool(self._lost))
        self._draft_frozen, self._traveling = False, None

        # Remove records of steps after the checkpoint, because these steps run again.
        if odd := truncate_records(self.run_dir, self.version):
            self.bus.event("odd_lines", lines=odd[:20], count=len(odd))

        self._monitor.resume_after(self.version)
        self._backlog = Backlog(
            self.config.pipeline,
            self.prompts,
            self.ledger,
            version=self.version,
            steps=self.config.run.steps,
            event=self.bus.event,
            finished=finished,
            trains=self.config.run.half.trains,
        )
        await self._backlog.start()

        # Generation and the monitor run in the background until training ends. Weights are sent in the
        # background too; if that fails, the step in progress fails.
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._generate_groups()),
                tasks.create_task(self._monitor.watch()),
            ]
            await self._train(tasks)
            # After a stop the newest step is already recorded, so its weight update has no record.
            await self._wait_until_served()
            for task in background:
                task.cancel()

        if self._stop_reason:
            self.bus.event("run_stopped", reason=self._stop_reason)
        if self.version or not self._stop_reason:
            await self._saves.require(self.version, self._backlog)
        if self.version == self.config.run.steps and (dropped := self.ledger.drop_unfinished("run ended")):
            self.bus.event("prompts_dropped", count=dropped, reason="run ended")

        self.bus.emit(self.version, self._spans.drain())

    async def _recover(self, lost: BaseExceptionGroup) -> None:
        """Build another trainer. Raises RunStopped after too many losses."""
        allowed = self.config.cluster.max_trainer_restarts
        while True:
            self._lost += 1
            if self._lost > allowed:
                raise RunStopped(
                    f"the trainer was lost {self._lost} times (cluster.max_trainer_restarts={allowed}); the "
                    f"last: {first_cause(lost)}. {CONTINUES}"
                ) from first_cause(lost)
            try:
                await self.cluster.rebuild_trainer()
                break
            except TrainerLost as again:
                lost = BaseExceptionGroup("again", [again])

        # The steps since the checkpoint run again: remove their records and start a new monitor.
        self.bus.event("trainer_restarted", restarts=self._lost, step=self.version)
        await asyncio.to_thread(self.bus.take_back)
        self._monitor = Monitor(self.config, self.run_dir, self.bus.event)
        self._tasks = {}

    def request_stop(self) -> None:
        """Make `run` finish the step in progress, save a checkpoint and return."""
        self._stop.set()

    async def waits_for(self) -> str:
        """Return a text on what the run currently waits for."""
        work = self._lane.work
        by_workers = await self.cluster.activity() if work in ("wait", "validate") else []
        return "; ".join([_WAITS.get(work, "a checkpoint, or the loop to begin"), *by_workers])

    async def _generate_groups(self) -> None:
        """Admit groups, as many as staleness allows; each runs as a separate task."""
        async with asyncio.TaskGroup() as collecting:
            while True:
                index, prompt = await self._backlog.admit_next()
                self._tasks[index] = collecting.create_task(self._collect(index, prompt))

    async def _collect(self, index: int, prompt: Prompt) -> None:
        """Generate one group, and pass it to the backlog."""
        group = await self.cluster.collect(prompt, self.config.pipeline.group_size)
        del self._tasks[index]

        # Too many masked attempts stop the run.
        self.bus.progressed()
        self._masked.see(group.trajectories)
        if self._masked.stop_reason:
            self.request_stop()

        await self._backlog.finished(index, group)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Train: take a batch, step, publish weights, validate, save. tasks: runs the sending of weights."""
        settings = self.config.run
        if self.version == 0:
            await self._validate()
            self._monitor.see(self.bus.commit(0))

        while self.version < settings.steps:
            started = time.monotonic()
            with self._lane.span("wait", version=self.version):
                groups = await self._unless_stopped(self._backlog.take_batch())
            if groups is None:
                return

            waited = time.monotonic() - started
            metrics = trajectory_metrics(groups, self.version) | self._info.training(groups)
            metrics |= self._saves.take_metrics() | member_metrics(groups, self.config.env.mix)
            self._record_trajectories(groups[0])

            # The probe reads the weights that generated this batch, so it comes before the update.
            with self._lane.span("probe", version=self.version):
                metrics |= await self._monitor.before_update(self.version, groups, self.cluster.probe)

            # Freeze the draft, once, if training makes it worse.
            if self._monitor.draft_harmed and not self._draft_frozen:
                await self.cluster.freeze_draft()
                self._draft_frozen = True
                self.bus.event("draft_frozen", step=self.version)

            with self._lane.span("train", version=self.version):
                metrics |= await self.cluster.train_step(groups)
            self.version += 1

            # The new version makes some groups in flight too stale.
            for index in await self._backlog.trained(self.version):
                self._tasks.pop(index).cancel()
            # The validation score belonged to the previous version.
            self._saves.score = None

            # One version is sent at a time, while the next step trains. Wait for it at once without
            # staleness, as the next step needs groups of this version, and before a validation, which needs
            # it served.
            trained = time.monotonic()
            with self._lane.span("sync", version=self.version):
                self.bus.emit(self.version, await self._wait_until_served())
                send = await self.cluster.publish_weights(self.version)
                self._traveling = tasks.create_task(self._bring_weights(self.version, send))
                if not self.config.pipeline.max_staleness or self._due(self.config.val.every):
                    self.bus.emit(self.version, await self._wait_until_served())
            metrics["timing_s/wait_weights"] = Mean(time.monotonic() - trained, 1)

            metrics |= await self.cluster.rollout_metrics()
            seconds = time.monotonic() - started
            metrics |= (
                _step_metrics(groups, self.version, seconds=seconds, waited=waited) | self._backlog.metrics()
            )
            metrics |= self._masked.metrics()

            self.bus.emit(self.version, metrics | self._spans.drain())
            self.bus.emit(self.version, self._monitor.split(self.bus.peek(self.version)))

            # Commit after validation, which adds its metrics to the record of this step.
            if self._due(self.config.val.every):
                await self._validate()
            record = self.bus.commit(self.version)
            self._monitor.see(record)
            self.growth.see(record)

            # Save after the commit, so that every checkpoint has its record.
            if self._due(settings.save_every):
                await self._saves.save(self.version, self._backlog)

            report_every = self.config.metrics.report_every
            if report_every and self.version % report_every == 0:
                await asyncio.to_thread(write_report, [self.run_dir], self.run_dir / "report.html")

    async def _bring_weights(
        self, version: int, send: Callable[[], Awaitable[dict[str, Value]]]
    ) -> dict[str, Value]:
        """Send a version to all engines, then open the gate for it; return the metrics."""
        metrics = await send()
        await self._backlog.open_gate(version)
        return metrics

    async def _wait_until_served(self) -> dict[str, Value]:
        """Wait until all engines serve the newest version; return the metrics of its update."""
        traveling, self._traveling = self._traveling, None
        return {} if traveling is None else await traveling

    def _due(self, every: int) -> bool:
        """Return whether an action that runs every `every` steps is due; it always is after the last step."""
        return self.version == self.config.run.steps or bool(every and self.version % every == 0)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None when a stop is requested first."""
        if self._stop.is_set():
            work.close()
            return None

        working = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stop.cancel()

    async def _validate(self) -> None:
        """Measure the reward on the held-out sets; report it under the current step."""
        settings = self.config.val
        if not settings.every:
            return

        started = time.monotonic()
        metrics: dict[str, Value] = {}
        count = settings.samples * sum(map(len, self.held_out.values()))
        self.bus.event("phase", message=f"validating version {self.version} by {count} attempts")

        for number, (split, ids) in enumerate(self.held_out.items()):
            with self._lane.span("validate", version=self.version, split=split):
                trajectories = await self._unless_stopped(
                    self.cluster.evaluate(ids, settings.samples, settings.temperature)
                )

            if trajectories is None:
                return

            self._masked.report(trajectories)
            if number == 0:
                self._monitor.validated(self.version, trajectories)
            metrics |= validation_metrics(split, trajectories, primary=number == 0)
            metrics |= self._info.validation(split, trajectories)
            if sample := first_sample(split, trajectories):
                self.bus.event("sample", step=self.version, **sample)

        # `run.keep_best` compares this version's score.
        if SCORE in metrics:
            self._saves.score = metrics[SCORE].value()

        metrics["timing_s/validate"] = Mean(time.monotonic() - started, 1)
        self.bus.emit(self.version, metrics)

    def _record_trajectories(self, group: Group) -> None:
        """Append one group per step, as text, for the trajectory viewer; a full disk is not an error."""
        lines = [
            json.dumps(
                {
                    "step": self.version + 1,
                    "instance_id": trajectory.instance_id,
                    "reward": trajectory.reward,
                    "turns": trajectory.info.get("turns", []),
                }
            )
            for trajectory in group.trajectories
        ]
        try:
            with (self.run_dir / "trajectories.jsonl").open("a") as file:
                file.write("".join(line + "\n" for line in lines))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.bus.disk_full("trajectories.jsonl", error)


def first_cause(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group: the error that caused the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]

    return error


def _step_metrics(groups: list[Group], version: int, *, seconds: float, waited: float) -> dict[str, Value]:
    """Return the metrics that only the loop can measure: seconds and tokens of a step."""
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
