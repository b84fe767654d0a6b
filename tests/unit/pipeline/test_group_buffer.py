import asyncio

import pytest

from rlpipe.pipeline.group_buffer import GroupBuffer
from rlpipe.types import Group, Prompt

pytestmark = pytest.mark.unit


def group(index: int) -> Group:
    return Group(prompt=Prompt(instance_id="i", group_id=f"g{index}"), trajectories=[])


def test_groups_leave_in_admission_order_whatever_order_they_finish_in():
    async def scenario():
        buffer = GroupBuffer()
        taking = asyncio.create_task(buffer.take(2))
        for index in (2, 1, 3):
            await buffer.put(index, group(index))
            await asyncio.sleep(0)
            assert not taking.done()
        await buffer.put(0, group(0))
        first = await taking
        second = await buffer.take(2)
        return [g.prompt.group_id for g in first + second]

    assert asyncio.run(scenario()) == ["g0", "g1", "g2", "g3"]


def test_the_same_group_cannot_be_handed_in_twice():
    async def scenario():
        buffer = GroupBuffer()
        await buffer.put(0, group(0))
        await buffer.put(0, group(0))

    with pytest.raises(AssertionError, match="twice"):
        asyncio.run(scenario())
