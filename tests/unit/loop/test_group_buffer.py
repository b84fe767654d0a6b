import asyncio

import pytest

from rlpipe.loop.group_buffer import GroupBuffer
from rlpipe.types import Group, Prompt

pytestmark = pytest.mark.unit


def group(index: int) -> Group:
    return Group(prompt=Prompt(instance_id="i", group_id=f"g{index}"), trajectories=[])


def test_groups_leave_in_admission_order_whatever_order_they_finish_in():
    async def scenario():
        buffer = GroupBuffer()
        taking = asyncio.create_task(buffer.take_finished_groups(2))
        for index in (2, 1, 3):
            await buffer.put(index, group(index))
            await asyncio.sleep(0)
            assert not taking.done()
        await buffer.put(0, group(0))
        first = await taking
        second = await buffer.take_finished_groups(2)
        return [g.prompt.group_id for _, g in first + second]

    assert asyncio.run(scenario()) == ["g0", "g1", "g2", "g3"]


def test_the_same_group_cannot_be_handed_in_twice():
    async def scenario():
        buffer = GroupBuffer()
        await buffer.put(0, group(0))
        await buffer.put(0, group(0))

    with pytest.raises(AssertionError, match="twice"):
        asyncio.run(scenario())


def test_nobody_waits_for_a_group_that_was_skipped():
    async def scenario():
        buffer = GroupBuffer()
        for index in (0, 2, 3):
            await buffer.put(index, group(index))
        taking = asyncio.create_task(buffer.take_finished_groups(3))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.skip(1)
        return [index for index, _ in await asyncio.wait_for(taking, 5)]

    assert asyncio.run(scenario()) == [0, 2, 3]


def test_out_of_order_the_first_to_finish_are_the_first_to_leave():
    async def scenario():
        buffer = GroupBuffer(in_order=False)
        for index in (5, 2, 9):
            await buffer.put(index, group(index))
        first = await buffer.take_finished_groups(2)
        await buffer.put(1, group(1))
        return [index for index, _ in first + await buffer.take_finished_groups(2)]

    assert asyncio.run(scenario()) == [2, 5, 1, 9]


def test_a_take_that_is_given_up_leaves_everything_in_its_place():
    async def scenario():
        buffer = GroupBuffer()
        await buffer.put(0, group(0))
        taking = asyncio.create_task(buffer.take_finished_groups(2))
        await asyncio.sleep(0)
        taking.cancel()
        await buffer.put(1, group(1))
        return [index for index, _ in await asyncio.wait_for(buffer.take_finished_groups(2), 5)]

    assert asyncio.run(scenario()) == [0, 1]
