import asyncio

import pytest

from rlpipe.pipeline.staleness import StalenessGate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_gate_admits_exactly_the_groups_that_cannot_become_too_stale(max_staleness):
    gate = StalenessGate(max_staleness=max_staleness, groups_per_step=4, version=2)
    trained_by_step = {index: index // 4 for index in range(100)}
    for index, step in trained_by_step.items():
        assert gate.is_open(index) == (step - 2 <= max_staleness)


def test_admit_waits_until_advance():
    async def scenario():
        gate = StalenessGate(max_staleness=0, groups_per_step=2)
        await gate.admit(1)
        waiting = asyncio.create_task(gate.admit(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await gate.advance(1)
        await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())
