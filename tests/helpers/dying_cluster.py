"""A cluster that dies on schedule, below the real controller, ledger and checkpoints.

The trainer is an oracle: its state names every group it was trained on, in order, and a number that depends
on each token and each earlier step, bit for bit. What it learnt twice, or lost, is in its checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.run import ClusterConfig, Config, RunSettings, ValConfig
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.cluster_protocol import TrainerLost
from rlpipe.loop.controller import Controller
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.jsonl import MetricsFile
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

INSTANCES = 12


@dataclass(slots=True, kw_only=True)
class Faults:
    """Chances. worker: a rollout worker dies while it plays a group (and it is played again elsewhere).
    environment: an attempt is masked. trainer: the trainer fails in a step, which ends the process.
    lost: the trainer dies before a step, in it, while weights are read or a checkpoint is written."""

    worker: float = 0.0
    environment: float = 0.0
    trainer: float = 0.0
    lost: float = 0.0


@dataclass(slots=True, kw_only=True)
class DyingCluster:
    """Trains a number; `luck` draws the faults and the time things take. die_at: version never published.

    lose_at: at the chance of this number (from 1) the trainer is lost for sure.
    """

    luck: random.Random
    faults: Faults = field(default_factory=Faults)
    weight: float = 1.0
    learnt: list[str] = field(default_factory=list)
    served: tuple[int, float] = (0, 1.0)
    staleness: list[int] = field(default_factory=list)
    trainer_version: int = 0
    die_at: int | None = None
    lose_at: int | None = None
    dead: bool = False
    losses: int = 0
    chances: int = 0

    def _may_be_lost(self) -> None:
        """A trainer that died stays dead until it is built again."""
        self.chances += 1
        if self.chances == self.lose_at or self.luck.random() < self.faults.lost:
            self.dead = True
        if self.dead:
            raise TrainerLost("it died")

    async def rebuild_trainer(self) -> None:
        await asyncio.sleep(0)
        self.dead, self.losses = False, self.losses + 1
        self.weight, self.learnt, self.trainer_version = 1.0, [], 0

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        while True:
            played = [await self._play(prompt, name) for name in prompt.trajectory_ids(group_size)]
            if self.luck.random() >= self.faults.worker:
                return Group(prompt=prompt, trajectories=played)

    async def _play(self, prompt: Prompt, name: str) -> Trajectory:
        """Tokens are functions of the prompt's seed and of the weights served when each is sampled."""
        own = random.Random(f"{prompt.seed}/{name}")
        t = Trajectory(trajectory_id=name, group_id=prompt.group_id, instance_id=prompt.instance_id)
        tokens, versions, logprobs = [], [], []
        for _ in range(own.randint(1, 6)):
            version, weight = self.served
            draw = own.random() * weight
            tokens.append(int(draw * 1000) % 97)
            versions.append(version)
            logprobs.append(-draw)
            for _ in range(self.luck.randrange(3)):
                await asyncio.sleep(0)
        t.token_ids, t.versions = np.array(tokens, np.int32), np.array(versions, np.int32)
        t.rollout_logprobs = np.array(logprobs, np.float32)
        t.loss_mask = np.ones(len(t.token_ids), bool)
        t.entropies = np.full(len(t.token_ids), 0.5, np.float32)
        if self.luck.random() < self.faults.environment:
            t.status = TrajectoryStatus.MASKED
        else:
            t.reward = float(t.token_ids[-1] % 3 == 0)
        return t

    async def evaluate(self, instance_ids, samples, temperature):
        return []

    async def train_step(self, groups):
        if self.luck.random() < self.faults.trainer:
            raise RuntimeError("the trainer died")
        self._may_be_lost()
        for group in groups:
            self.learnt.append(group.prompt.group_id)
            for t in group.trajectories:
                if t.status is TrajectoryStatus.COMPLETE:
                    self.staleness.append(self.trainer_version - t.oldest_version)
                    self.weight = (self.weight * 1.1 - float(t.rollout_logprobs.sum()) * t.reward) % 7.3 + 0.1
        self.trainer_version += 1
        await asyncio.sleep(0)
        self._may_be_lost()
        return {}

    async def publish_weights(self, version):
        self._may_be_lost()
        if version == self.die_at:
            die()
        copied = version, self.weight

        async def send():
            for _ in range(self.luck.randrange(9)):
                await asyncio.sleep(0)
            self._may_be_lost()
            self.served = copied
            return {}

        return send

    async def save(self, directory):
        state = {"weight": self.weight, "learnt": list(self.learnt), "version": self.trainer_version}
        (directory / "trainer").mkdir()

        async def write():
            for part, value in state.items():
                self._may_be_lost()
                (directory / "trainer" / part).write_text(json.dumps(value))
                await asyncio.sleep(0)

        return write

    async def load(self, directory):
        state = {name: json.loads((directory / "trainer" / name).read_text()) for name in PARTS}
        self.weight, self.learnt, self.trainer_version = (state[name] for name in PARTS)

    async def rollout_metrics(self):
        return {}

    async def activity(self):
        return []

    async def close(self):
        pass

    async def probe(self, trajectories):
        return []


PARTS = ("weight", "learnt", "version")


def controller(
    directory: Path,
    cluster: DyingCluster,
    *,
    steps: int = 6,
    save_every: int = 1,
    trainer_restarts: int = 0,
    **pipeline,
):
    """The real controller in a directory; keyword arguments are settings of the pipeline."""
    (directory / "checkpoints").mkdir(exist_ok=True, parents=True)
    config = Config(
        run=RunSettings(dir=str(directory), steps=steps, save_every=save_every),
        pipeline=PipelineConfig(**{"prompts_per_step": 3, "group_size": 3} | pipeline),
        val=ValConfig(every=0),
        cluster=ClusterConfig(max_trainer_restarts=trainer_restarts),
    )
    bus = MetricsBus([MetricsFile(directory / "metrics.jsonl")], events=directory / "events.jsonl")
    return Controller(
        config=config,
        run_dir=directory,
        cluster=cluster,
        prompts=PromptStream([f"i{n}" for n in range(INSTANCES)], seed=0),
        held_out={},
        bus=bus,
        ledger=Ledger(directory / "ledger.sqlite", bus.event),
        checkpoints=CheckpointStore(directory / "checkpoints", keep=2),
    )


async def _run_and_close(run: Controller) -> None:
    try:
        await asyncio.wait_for(run.run(), 60)
    finally:
        await run.cluster.close()


def finish(run: Controller, then: Callable[[Ledger], None] = lambda ledger: None) -> None:
    """Run to the end and close what it wrote; `then` sees the ledger of a run that ended well."""
    try:
        asyncio.run(_run_and_close(run))
        then(run.ledger)
    finally:
        run.ledger.close()
        run.bus.close()


FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "sqlite3.connect")


def at_file_operation(number: int, below: Path, act: Callable[[], None]) -> list[int]:
    """Call `act` before the number-th (0-based) operation on a file below a directory; returns its counter.

    Uses an audit hook, which cannot be removed: for processes that end.
    """
    seen = [0]

    def hook(event: str, arguments: tuple) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(below)):
            if seen[0] == number:
                act()
            seen[0] += 1

    sys.addaudithook(hook)
    return seen


def die() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def state_of(directory: Path, step: int) -> dict:
    """What the trainer had learnt at a checkpoint."""
    folder = directory / "checkpoints" / f"step_{step}" / "trainer"
    return {name: json.loads((folder / name).read_text()) for name in PARTS}
