"""The async loop: rollout and training at the same time, staleness bounded.

    Backlog.admit --> _roll --> cluster.collect --> Backlog.finished --> _train --> publish --> advance
       ^ waits: the gate                              waits: take                                  |
       +-------------------------------- wakes -----------------------------------------------------+

| who    | waits for                              | woken by                            |
| _roll  | the gate to admit group n              | `backlog.advance` after a publish   |
| _train | the next `prompts_per_step` groups     | a `_collect` task's `finished`      |
| stop   | the step in progress                   | `request_stop` (Ctrl-C)             |
| _save  | the checkpoint before, if it is still  | its writer, beside the next steps   |
|        | being written: one at a time           |                                     |

Synchronous training is the same code with max_staleness = 0. When the trainer is lost, the cluster builds
another, and the loop begins again as a resumed run does: from the newest checkpoint and its ledger. Owns the
loop and nothing else: where components run is the cluster's business, what a step does is the trainer's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlpipe.config.run import Config
from rlpipe.metrics.bus import NO_ROOM, MetricsBus
from rlpipe.metrics.collect import trajectory_metrics, validation_metrics
from rlpipe.metrics.jsonl import forget_steps
from rlpipe.metrics.monitor import Monitor
from rlpipe.metrics.probe import ProbeTable
from rlpipe.metrics.report import write_report
from rlpipe.metrics.spans import Lane, SpanLog
from rlpipe.metrics.values import Last, Mean, Value
from rlpipe.pipeline.backlog import GROUPS, LEDGER, Backlog
from rlpipe.pipeline.checkpoints import SCORE, CheckpointStore
from rlpipe.pipeline.ledger import Ledger
from rlpipe.pipeline.prompts import PromptStream
from rlpipe.types import Group, Prompt, Trajectory

T = TypeVar("T")


class TrainerLost(RuntimeError):
    """Some rank of the trainer died or hangs; none of its ranks is left."""


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

    async def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        """Target and draft of the trainer at every context of these."""
        ...

    async def freeze_draft(self) -> None:
        """No longer train the draft beside the policy."""
        ...

    async def publish_weights(self, version: int) -> dict[str, Value]:
        """Trainer weights, target and draft, to every engine; they serve `version` on return."""
        ...

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Copy trainer state; calling what is returned writes it, with an HF checkpoint, into the directory.

        Steps may be taken meanwhile, and change nothing of what is written.
        """
        ...

    async def load(self, directory: Path) -> None:
        """Trainer state from a checkpoint directory."""
        ...

    async def rebuild_trainer(self) -> None:
        """After `TrainerLost`: a trainer that has learnt nothing in the place of the lost one."""
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
    _backlog: Backlog = field(init=False)
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _saving: dict[str, Value] = field(default_factory=dict, init=False)  # told with the next step
    _saved: int | None = field(default=None, init=False)  # version of the newest checkpoint
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    _lost: int = field(default=0, init=False)  # trainers
    _score: float | None = field(default=None, init=False)
    _draft_frozen: bool = field(default=False, init=False)
    _spans: SpanLog = field(default_factory=lambda: SpanLog("controller"), init=False)
    _lane: Lane = field(init=False)
    _monitor: Monitor = field(init=False)

    def __post_init__(self) -> None:
        self._lane = Lane(self._spans, 0)
        self._monitor = Monitor(self.config, self.run_dir, self.bus.event)

    async def run(self) -> None:
        """Train until `run.steps` or a stop request; always leaves a checkpoint of the last step."""
        while True:
            lost: BaseExceptionGroup | None = None
            try:
                return await self._run()
            except* TrainerLost as caught:
                lost = caught
            finally:
                if self._writing is not None:
                    await asyncio.wait({self._writing})
            await self._recover(lost)

    async def _run(self) -> None:
        """From the newest checkpoint to the end."""
        finished, self._draft_frozen = await self._resume(), False
        forget_steps(self.run_dir, self.version)
        self._monitor.forget_after(self.version)
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
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._roll()), tasks.create_task(self._monitor.watch())]
            await self._train()
            for task in beside:
                task.cancel()
        await self._written()
        if self._saved != self.version:
            await self._save()
            await self._written()
        if self._saved != self.version:
            raise RuntimeError(
                f"the checkpoint of step {self.version} could not be written (checkpoint_failed in "
                "events.jsonl): correct the cause and run again, it continues from the one before."
            )
        if self.version == self.config.run.steps and (dropped := self.ledger.drop_unfinished("run ended")):
            self.bus.event("prompts_dropped", count=dropped, reason="run ended")
        self.bus.emit(self.version, self._spans.drain())

    async def _recover(self, lost: BaseExceptionGroup) -> None:
        """Have another trainer built, or give up."""
        allowed = self.config.cluster.max_trainer_restarts
        while True:
            self._lost += 1
            if self._lost > allowed:
                raise RuntimeError(
                    f"the trainer was lost {self._lost} times (cluster.max_trainer_restarts={allowed}); the "
                    f"last: {first_cause(lost)}. Run again, it continues from the newest checkpoint."
                ) from first_cause(lost)
            try:
                await self.cluster.rebuild_trainer()
                break
            except TrainerLost as again:
                lost = BaseExceptionGroup("again", [again])
        self.bus.event("trainer_restarted", restarts=self._lost, step=self.version)
        await asyncio.to_thread(self.bus.take_back)
        self._monitor = Monitor(self.config, self.run_dir, self.bus.event)
        self._tasks, self._saving, self._writing = {}, {}, None

    def request_stop(self) -> None:
        """Finish the step in progress, checkpoint, return from `run`."""
        self._stop.set()

    async def _roll(self) -> None:
        """Admit groups, as many as staleness allows; each runs as a task of its own."""
        async with asyncio.TaskGroup() as collecting:
            while True:
                index, prompt = await self._backlog.admit()
                self._tasks[index] = collecting.create_task(self._collect(index, prompt))

    async def _collect(self, index: int, prompt: Prompt) -> None:
        group = await self.cluster.collect(prompt, self.config.pipeline.group_size)
        del self._tasks[index]
        await self._backlog.finished(index, group)

    async def _train(self) -> None:
        """The training loop: take a batch, step, publish, open the gate."""
        settings = self.config.run
        if self.version == 0:
            await self._validate()
            self._monitor.see(self.bus.commit(0))
        while self.version < settings.steps:
            started = time.monotonic()
            with self._lane.span("wait", version=self.version):
                groups = await self._unless_stopped(self._backlog.take())
            if groups is None:
                return
            waited = time.monotonic() - started
            metrics = trajectory_metrics(groups, self.version) | self._saving
            self._saving = {}
            self._record_trajectories(groups[0])
            with self._lane.span("probe", version=self.version):
                metrics |= await self._monitor.before_update(self.version, groups, self.cluster.probe)
            if self._monitor.draft_harmed and not self._draft_frozen:
                await self.cluster.freeze_draft()
                self._draft_frozen = True
                self.bus.event("draft_frozen", step=self.version)
            with self._lane.span("train", version=self.version):
                metrics |= await self.cluster.train_step(groups)
            self.version += 1
            self._backlog.trained(self.version)
            self._score = None
            with self._lane.span("sync", version=self.version):
                metrics |= await self.cluster.publish_weights(self.version)
            for index in await self._backlog.advance(self.version):
                self._tasks.pop(index).cancel()
            metrics |= await self.cluster.rollout_metrics()
            seconds = time.monotonic() - started
            metrics |= _step_metrics(groups, self.version, seconds, waited) | self._backlog.metrics()
            self.bus.emit(self.version, metrics | self._spans.drain())
            if self._due(self.config.val.every):
                await self._validate()
            self._monitor.see(self.bus.commit(self.version))
            if self._due(settings.save_every):  # after the commit: a checkpoint never lacks its record
                await self._save()
            report_every = self.config.metrics.report_every
            if report_every and self.version % report_every == 0:
                await asyncio.to_thread(write_report, [self.run_dir], self.run_dir / "report.html")

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps is due; after the last step it always is."""
        return self.version == self.config.run.steps or bool(every and self.version % every == 0)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None once a stop was requested before it was there."""
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
        """Reward on the held-out sets at the current version, reported under the current step."""
        settings = self.config.val
        if not settings.every:
            return
        started = time.monotonic()
        metrics: dict[str, Value] = {}
        self.bus.event("phase", message=f"validating version {self.version}")
        for number, (split, ids) in enumerate(self.held_out.items()):
            with self._lane.span("validate", version=self.version, split=split):
                played = await self._unless_stopped(
                    self.cluster.evaluate(ids, settings.samples, settings.temperature)
                )
            if played is None:
                return
            if number == 0:
                self._monitor.validated(self.version, played)
            metrics |= validation_metrics(split, played, primary=number == 0)
        if SCORE in metrics:
            self._score = metrics[SCORE].value()
        metrics["timing_s/validate"] = Mean(time.monotonic() - started, 1)
        self.bus.emit(self.version, metrics)

    async def _save(self) -> None:
        """Have a checkpoint of this version written while training goes on, one at a time."""
        started = time.monotonic()
        await self._written()
        state: dict[str, Any] = {
            "recipe": self.config.recipe,
            "seed": self.config.run.seed,
            "half": self.config.run.half,
        }
        if self._score is not None:
            state[SCORE] = self._score
        try:
            with self._lane.span("checkpoint", version=self.version):
                directory = self.checkpoints.begin(self.version)
                parts = [_in_thread(self._backlog.save(directory)), await self.cluster.save(directory)]
        except TrainerLost:
            raise
        except Exception as error:  # whatever a full or broken disk makes of it, in whatever library
            self._not_saved(self.version, error)
            return
        self._writing = asyncio.create_task(self._write(self.version, state, parts))
        self._writing.add_done_callback(_seen)
        if not self.config.run.save_async:
            await self._written()
        self._saving["timing_s/save_checkpoint"] = Mean(time.monotonic() - started, 1)

    async def _write(
        self, version: int, state: dict[str, Any], parts: Sequence[Callable[[], Awaitable[None]]]
    ) -> None:
        """What was copied, to the disk. What fails is said, and the run goes on without it."""
        started = time.monotonic()
        try:
            with Lane(self._spans, 1).span("write checkpoint", version=version):
                for write in parts:
                    await write()
                path = await asyncio.to_thread(self.checkpoints.finish, version, state)
        except Exception as error:
            self._not_saved(version, error)
            if isinstance(error, TrainerLost):
                raise
            return
        seconds = time.monotonic() - started
        self._saved = version
        self._saving["timing_s/write_checkpoint"] = Mean(seconds, 1)
        self.bus.event("checkpoint", step=version, path=path.name, seconds=round(seconds, 3))

    async def _written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _not_saved(self, version: int, error: Exception) -> None:
        self.checkpoints.abandon(version)
        stands = max(self.checkpoints.steps(), default=None)
        self.bus.event("checkpoint_failed", step=version, stands=stands, error=_in_words(error))

    async def _resume(self) -> Path | None:
        """Continue from the newest checkpoint that can be loaded, if the run directory has one.

        Returns the finished groups it holds.
        """
        failed: list[tuple[int, Exception]] = []
        found = self.checkpoints.newest()
        while found is not None:
            path, state = found
            step = int(state["step"])
            self._require_same_half(step, state)
            try:
                await self.cluster.load(path)
                self.ledger.restore(path / LEDGER)
                break
            except TrainerLost:
                raise
            except Exception as error:  # of the trainer's formats, which know many
                failed.append((step, error))
                found = self.checkpoints.before(step)
        if failed and found is None:
            newest, error = failed[0]
            raise RuntimeError(
                f"no checkpoint could be loaded; step {newest}: {_in_words(error)}. Correct it, or remove "
                f"{self.checkpoints.path(newest).parent} to start from step 0."
            ) from error
        for number, error in failed:  # an older one was loaded: it is they that are broken, not the trainer
            self.checkpoints.set_aside(number, _in_words(error))
        for broken in self.checkpoints.broken:
            self.bus.event("checkpoint_corrupt", step=broken.step, reason=broken.reason)
        self.checkpoints.broken.clear()
        if found is None:
            self.ledger.forget()
            self.version, self._saved, self._score = 0, None, None
            if self._lost:  # the engines still serve what the lost trainer had learnt
                await self.cluster.publish_weights(0)
            return None
        self.version, self._saved, self._score = step, step, state.get(SCORE)
        await self.cluster.publish_weights(self.version)
        self.bus.event("resumed", step=self.version, path=path.name)
        return path / GROUPS

    def _require_same_half(self, step: int, state: dict[str, Any]) -> None:
        begun, now = state.get("half", "both"), self.config.run.half
        if begun != now:
            raise ValueError(
                f"step {step} is of a run with run.half={begun}, and run.half={now}: choose another run.dir."
            )

    def _record_trajectories(self, group: Group) -> None:
        """One group a step, readable, for the trajectory viewer; a full disk loses it and no more."""
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
            if error.errno not in NO_ROOM:
                raise
            self.bus.disk_full("trajectories.jsonl", error)


def _in_thread(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """Blocking work as something to await."""
    return lambda: asyncio.to_thread(work)


def _seen(task: asyncio.Task[None]) -> None:
    """Its failure was told; `_written` raises it, if the run comes to that."""
    if not task.cancelled():
        task.exception()


def first_cause(error: BaseException) -> BaseException:
    """The first leaf of an exception group: what actually went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _in_words(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
