"""The loop's gate and buffer under any order of finishing: nothing lost, nothing twice, staleness bounded."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.loop.group_buffer import GroupBuffer
from rlpipe.loop.staleness import StalenessGate
from rlpipe.types import Group, Prompt, Trajectory

pytestmark = pytest.mark.property
many = settings(max_examples=100, deadline=None)


def group_of(index: int, version: int) -> Group:
    trajectory = Trajectory(
        trajectory_id=f"{index}/0", group_id=str(index), instance_id="i", versions=[version]
    )
    return Group(prompt=Prompt(instance_id="i", group_id=str(index)), trajectories=[trajectory])


@given(st.integers(0, 20).flatmap(lambda n: st.permutations(range(n))), st.integers(0, 5), st.data())
@many
def test_the_buffer_hands_out_each_group_once_in_admission_order(order, first, data):
    """Groups finish in any order; takes of any sizes are asked for at any time."""
    sizes = []
    while sum(sizes) < len(order):
        sizes.append(data.draw(st.integers(1, len(order) - sum(sizes))))

    async def scenario():
        buffer = GroupBuffer(first=first)
        taken, put = [], []

        async def take():
            for size in sizes:
                groups = await buffer.take_finished_groups(size)
                assert len(groups) == size
                assert all(index == int(g.prompt.group_id) for index, g in groups)
                taken.extend(index for index, _ in groups)

        taking = asyncio.create_task(take())
        for index in order:
            await buffer.put(first + index, group_of(first + index, 0))
            put.append(first + index)
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert set(taken) <= set(put)
            assert len(buffer) + len(taken) <= len(put)
        await asyncio.wait_for(taking, 5)
        assert len(buffer) == 0
        return taken

    assert asyncio.run(scenario()) == [first + i for i in range(len(order))]


async def play(
    *, max_staleness: int, per_step: int, steps: int, start: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """The loop of the controller with rollouts that finish in random order.

    Returns the groups trained on, in order, and the staleness of each when it was.
    """
    gate = StalenessGate(max_staleness=max_staleness, groups_per_step=per_step, version=start)
    buffer = GroupBuffer(first=start * per_step)
    flying: dict[int, asyncio.Future[None]] = {}
    trained, staleness = [], []

    async def collect(index: int) -> None:
        group = group_of(index, gate.version)
        flying[index] = asyncio.get_running_loop().create_future()
        await flying[index]
        (trajectory,) = group.trajectories
        trajectory.versions = np.append(trajectory.versions, gate.version)
        await buffer.put(index, group)

    async def roll(tasks: asyncio.TaskGroup) -> None:
        for index in range(start * per_step, (start + steps) * per_step):
            await gate.wait_for_slot(index)
            tasks.create_task(collect(index))

    async def train() -> None:
        for version in range(start, start + steps):
            for index, group in await buffer.take_finished_groups(per_step):
                trained.append(index)
                staleness.append(version - group.trajectories[0].oldest_version)
            await gate.set_version(version + 1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(roll(tasks))
        training = tasks.create_task(train())
        idle = 0
        while not training.done():
            for _ in range(rng.randrange(1, 6)):
                await asyncio.sleep(0)
            idle = 0 if flying else idle + 1
            assert idle < 100, "the loop waits for nothing"
            if flying:
                flying.pop(rng.choice(sorted(flying))).set_result(None)
    return trained, staleness


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.randoms())
@many
def test_every_admitted_group_is_trained_once_and_never_staler_than_the_bound(
    max_staleness, per_step, steps, start, rng
):
    trained, staleness = asyncio.run(
        play(max_staleness=max_staleness, per_step=per_step, steps=steps, start=start, rng=rng)
    )
    assert trained == list(range(start * per_step, (start + steps) * per_step))
    assert min(staleness) >= 0 and max(staleness) <= max_staleness


def test_the_bound_is_reached_so_a_tighter_gate_would_be_noticed():
    """With all groups admitted as early as allowed, the last ones are exactly max_staleness behind."""
    _, staleness = asyncio.run(play(max_staleness=3, per_step=2, steps=6, start=0, rng=random.Random(0)))
    assert max(staleness) == 3
