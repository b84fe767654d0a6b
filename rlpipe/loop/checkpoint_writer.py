"""Writes checkpoints of a run while it trains, one at a time, and loads one when the run starts again.

    save: state of trainer, groups and ledger is copied (the loop waits) --> a task writes it --> complete
                                                                                     |
    a second save, and the end of the run, wait for the first one's task  <----------+

Owns that order and its events. `CheckpointStore` creates a directory atomically; cluster, backlog and ledger
fill it. A write that fails is an event, and the checkpoint before it remains the newest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.config.run import Config
from rlpipe.envs.user_loop import retrieve
from rlpipe.loop.backlog import GROUPS, LEDGER, Backlog
from rlpipe.loop.checkpoints import SCORE, CheckpointStore
from rlpipe.loop.cluster_protocol import Cluster, TrainerLost
from rlpipe.loop.ledger import Ledger
from rlpipe.metrics.spans import Lane, SpanLog
from rlpipe.metrics.values import Mean, Value
from rlpipe.types import RunStopped


@dataclass(slots=True, kw_only=True)
class Saving:
    """Saves the checkpoints of one run. event: see `MetricsBus.event`. score: val/reward of the version."""

    config: Config
    cluster: Cluster
    store: CheckpointStore
    ledger: Ledger
    event: Callable[..., None]
    spans: SpanLog
    score: float | None = field(default=None, init=False)
    _saved: int | None = field(default=None, init=False)  # version of the newest checkpoint
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    _metrics: dict[str, Value] = field(default_factory=dict, init=False)

    def take_metrics(self) -> dict[str, Value]:
        """Return the seconds spent on saving since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def save(self, version: int, backlog: Backlog) -> None:
        """Copy the state of a checkpoint and start the task that writes it. Raises TrainerLost."""
        started = time.monotonic()

        # Only one checkpoint is written at a time.
        await self._written()
        run = self.config.run
        state: dict[str, Any] = {"recipe": self.config.recipe, "seed": run.seed, "half": run.half}
        if self.score is not None:
            state[SCORE] = self.score

        # The loop waits only while the state is copied.
        try:
            with Lane(self.spans, 0).span("checkpoint", version=version):
                directory = self.store.begin(version)
                parts = [_in_thread(backlog.save(directory)), await self.cluster.save(directory)]
        except TrainerLost:
            raise
        # With a full or broken disk each library raises a different exception.
        except Exception as error:
            self._not_saved(version, error)
            return

        self._writing = asyncio.create_task(self._write(version, state, parts))
        # An event reports a failure, and `_written` raises it.
        self._writing.add_done_callback(retrieve)
        if not run.save_async:
            await self._written()

        self._metrics["timing_s/save_checkpoint"] = Mean(time.monotonic() - started, 1)

    async def require(self, version: int, backlog: Backlog) -> None:
        """Wait until the checkpoint of a version is complete. Raises RunStopped if it cannot be written."""
        await self._written()
        if self._saved != version:
            await self.save(version, backlog)
            await self._written()
        if self._saved != version:
            newest = max(self.store.steps(), default=None)
            after = (
                "begins anew: there is none before it" if newest is None else f"continues after step {newest}"
            )
            raise RunStopped(
                f"the checkpoint of step {version} could not be written (checkpoint_failed in "
                f"events.jsonl): correct the cause and run again, it {after}."
            )

    async def settled(self) -> None:
        """Wait for the write in progress, successful or not, and reset the metrics of saving."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        self._writing, self._metrics = None, {}

    async def resume(self, *, served: bool) -> tuple[int, Path | None]:
        """Load the newest checkpoint that can be loaded; engines then serve its weights.

        served: whether engines may be serving weights of an abandoned version. Returns the version and the
        file of the finished groups; 0 and None without a checkpoint. Raises ValueError for a checkpoint with
        another run.half, RunStopped when there are checkpoints but none can be loaded.
        """
        # Try one checkpoint after another, from the newest to the oldest.
        failed: list[tuple[int, Exception]] = []
        checkpoint = self.store.newest()
        while checkpoint is not None:
            path, state = checkpoint
            step = int(state["step"])
            self._require_same_half(step, state)
            try:
                await self.cluster.load(path)
                self.ledger.restore(path / LEDGER)
                break
            except TrainerLost:
                raise
            # The trainer's file formats raise many kinds of exceptions.
            except Exception as error:
                failed.append((step, error))
                checkpoint = self.store.before(step)

        if failed and checkpoint is None:
            newest, error = failed[0]
            raise RunStopped(
                f"no checkpoint could be loaded; step {newest}: {_in_words(error)}. Correct it, or remove "
                f"{self.store.path(newest).parent} to start from step 0."
            ) from error

        # An older checkpoint could be loaded, so the newer ones must be broken.
        for number, error in failed:
            self.store.set_aside(number, _in_words(error))

        for broken in self.store.broken:
            self.event("checkpoint_corrupt", step=broken.step, reason=broken.reason)

        self.store.broken.clear()

        # Without a checkpoint the run starts from its first step.
        if checkpoint is None:
            self.ledger.clear()
            self._saved = self.score = None
            if served:
                await (await self.cluster.publish_weights(0))()
            return 0, None

        self._saved, self.score = step, state.get(SCORE)
        await (await self.cluster.publish_weights(step))()
        self.event("resumed", step=step, path=path.name)
        return step, path / GROUPS

    async def _write(
        self, version: int, state: dict[str, Any], parts: Sequence[Callable[[], Awaitable[None]]]
    ) -> None:
        """Write the copied state to the disk. A failure is reported as an event, and the run continues."""
        started = time.monotonic()
        try:
            with Lane(self.spans, 1).span("write checkpoint", version=version):
                for write in parts:
                    await write()
                path = await asyncio.to_thread(self.store.finish, version, state)
        except Exception as error:
            self._not_saved(version, error)
            if isinstance(error, TrainerLost):
                raise
            return

        seconds = time.monotonic() - started
        self._saved = version
        self._metrics["timing_s/write_checkpoint"] = Mean(seconds, 1)
        self.event("checkpoint", step=version, path=path.name, seconds=round(seconds, 3))

    async def _written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises TrainerLost."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _not_saved(self, version: int, error: Exception) -> None:
        self.store.abandon(version)
        newest = max(self.store.steps(), default=None)
        self.event("checkpoint_failed", step=version, newest=newest, error=_in_words(error))

    def _require_same_half(self, step: int, state: dict[str, Any]) -> None:
        begun, now = state.get("half", "both"), self.config.run.half
        if begun != now:
            raise ValueError(
                f"step {step} is of a run with run.half={begun}, and run.half={now}: choose another run.dir."
            )


def _in_thread(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """Wrap blocking work in an async function that runs it on a thread."""
    return lambda: asyncio.to_thread(work)


def _in_words(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
