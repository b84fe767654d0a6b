"""The backlog under every policy and any order of finishing: nothing lost, nothing twice, bounds kept."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.loop.backlog import GROUPS, LEDGER, MASKED, Backlog
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.types import Group, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.property

INSTANCES = 7
PIPELINES = st.builds(
    PipelineConfig,
    prompts_per_step=st.integers(1, 4),
    group_size=st.integers(2, 3),
    max_staleness=st.integers(0, 3),
    stale=st.sampled_from(Stale),
    filter_equal_rewards=st.booleans(),
    filter_limit=st.integers(1, 2),
) | st.builds(
    PipelineConfig,
    prompts_per_step=st.integers(1, 4),
    group_size=st.integers(2, 3),
    max_staleness=st.integers(0, 2),
    stale=st.just(Stale.DROP),
    oversample=st.sampled_from([1.3, 2.0]),
)


class Loop:
    """The controller's use of a backlog, with rollouts that advance in random order."""

    def __init__(self, pipeline: PipelineConfig, folder: Path, luck: random.Random, steps: int) -> None:
        self.pipeline, self.folder, self.luck, self.steps = pipeline, folder, luck, steps
        self.ledger = Ledger(folder / "live.sqlite")
        self.trained: list[list[str]] = []
        self.ages: list[int] = []
        self.version = 0
        self.saved: tuple | None = None

    def close(self) -> None:
        self.ledger.close()

    async def play(self, stop_at: int | None = None) -> None:
        """Train until `steps`, or until version `stop_at`, and then forget what was not saved."""
        finished = None
        if self.saved:
            self.version, trained, ages = self.saved
            self.trained, self.ages = list(trained), list(ages)
            self.ledger.restore(self.folder / LEDGER)
            finished = self.folder / GROUPS
        prompts = PromptStream([f"i{n}" for n in range(INSTANCES)], seed=1)
        backlog = Backlog(
            self.pipeline,
            prompts,
            self.ledger,
            version=self.version,
            steps=self.steps,
            event=lambda kind, **fields: None,
            finished=finished,
        )
        await backlog.start()
        playing: dict[int, asyncio.Task[None]] = {}

        async def collect(index, prompt):
            members = []
            for name in prompt.trajectory_ids(self.pipeline.group_size):
                t = Trajectory(trajectory_id=name, group_id=prompt.group_id, instance_id=prompt.instance_id)
                for _ in range(self.luck.randint(1, 3)):
                    t.versions = np.append(t.versions, self.version)
                    t.loss_mask = np.append(t.loss_mask, True)
                    for _ in range(self.luck.choice([0, 0, 1, 9])):
                        await asyncio.sleep(0)
                masked = self.luck.random() < 0.2
                t.status = TrajectoryStatus.MASKED if masked else TrajectoryStatus.COMPLETE
                t.reward = None if masked else float(self.luck.randint(0, 1))
                members.append(t)
            del playing[index]
            await backlog.finished(index, Group(prompt=prompt, trajectories=members))

        async def roll(tasks):
            while True:
                index, prompt = await backlog.admit_next()
                playing[index] = tasks.create_task(collect(index, prompt))

        async def train():
            while self.version < self.steps and self.version != stop_at:
                groups = await backlog.take_batch()
                assert len(groups) == self.pipeline.prompts_per_step
                await asyncio.sleep(0)
                self.trained.append([group.prompt.group_id for group in groups])
                complete = [
                    t for g in groups for t in g.trajectories if t.status is TrajectoryStatus.COMPLETE
                ]
                self.ages += [self.version - t.oldest_version for t in complete]
                self.version += 1
                for index in await backlog.trained(self.version):
                    playing.pop(index).cancel()
                await backlog.open_gate(self.version)
                backlog.metrics()
                assert self.ledger.violations() == []
                if self.luck.random() < 0.5:
                    for name in (LEDGER, GROUPS):
                        (self.folder / name).unlink(missing_ok=True)
                    backlog.save(self.folder)()
                    self.saved = (self.version, list(self.trained), list(self.ages))

        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(roll(tasks))
            await asyncio.wait_for(train(), 20)
            rolling.cancel()
            for task in list(playing.values()):
                task.cancel()


@given(PIPELINES, st.integers(1, 5), st.integers(0, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_under_every_policy_each_prompt_ends_once_and_bounds_hold(pipeline, steps, stop_at, seed):
    """The run is cut off at version `stop_at` and goes on from what it last saved."""
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(pipeline, Path(folder), random.Random(seed), steps)
        asyncio.run(loop.play(stop_at))
        if loop.saved is None:
            loop.ledger.clear()
            loop.version, loop.trained, loop.ages = 0, [], []
        asyncio.run(loop.play())
        names = [name for batch in loop.trained for name in batch]
        assert len(loop.trained) == steps and max(Counter(names).values()) == 1
        if pipeline.stale is Stale.WAIT:
            assert names == sorted(names)
            if not pipeline.filter_equal_rewards:
                rows = loop.ledger._db.execute("SELECT group_id FROM prompts WHERE reason = ?", (MASKED,))
                masked = {name for (name,) in rows}  # a step never trains on nothing
                given = (f"g{n:06d}" for n in range(len(names) + len(masked)))
                assert names == [name for name in given if name not in masked][: len(names)]
        if pipeline.stale is not Stale.KEEP:
            assert max(loop.ages, default=0) <= pipeline.max_staleness
        counts = loop.ledger.counts()
        dropped = loop.ledger.drop_unfinished("run ended")
        if pipeline.oversample == 1:
            assert dropped == 0, f"admitted and never needed: {counts}"
        assert loop.ledger.violations(ended=True, epoch=INSTANCES) == []
        assert sum(loop.ledger.counts().values()) == loop.ledger.admitted_count()
        loop.close()


def ages_of(stale: Stale, max_staleness: int) -> list[int]:
    pipeline = PipelineConfig(prompts_per_step=3, group_size=2, max_staleness=max_staleness, stale=stale)
    ages = []
    for seed in range(8):
        with tempfile.TemporaryDirectory() as folder:
            loop = Loop(pipeline, Path(folder), random.Random(seed), 8)
            asyncio.run(loop.play())
            loop.close()
            ages += loop.ages
    return ages


def test_keep_trains_on_tokens_that_drop_gives_up_so_a_policy_that_drops_nothing_is_noticed():
    assert max(ages_of(Stale.KEEP, 1)) > 1 == max(ages_of(Stale.DROP, 1))
