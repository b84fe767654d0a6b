import asyncio

import pytest

from rlpipe.loop.staleness import StalenessGate, fresh_part
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

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
        await gate.wait_for_slot(1)
        waiting = asyncio.create_task(gate.wait_for_slot(2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await gate.set_version(1)
        await asyncio.wait_for(waiting, 1)

    asyncio.run(scenario())


def test_a_group_that_ended_untrained_makes_room_and_the_limit_counts_the_others():
    async def scenario():
        gate = StalenessGate(max_staleness=0, groups_per_step=2, ahead=3, limit=5)
        opened = [[index for index in range(9) if gate.is_open(index)]]
        await gate.release_slot()
        opened.append([index for index in range(9) if gate.is_open(index)])
        await gate.set_version(1)
        opened.append([index for index in range(9) if gate.is_open(index)])
        await gate.set_version(2)
        return [len(own) for own in opened] + [sum(gate.is_open(index) for index in range(9))]

    assert asyncio.run(scenario()) == [3, 4, 6, 6]


def group(*attempts) -> Group:
    """Attempts are (versions of the tokens, reward); a reward of None is a masked one."""
    members = [
        Trajectory(
            trajectory_id=f"g/{n}",
            group_id="g",
            instance_id="i",
            versions=versions,
            reward=reward,
            status=TrajectoryStatus.MASKED if reward is None else TrajectoryStatus.COMPLETE,
        )
        for n, (versions, reward) in enumerate(attempts)
    ]
    return Group(prompt=Prompt(instance_id="i", group_id="g"), trajectories=members)


def names(trajectories) -> list[str]:
    return [t.trajectory_id for t in trajectories]


def test_one_old_token_makes_a_trajectory_too_stale_and_its_siblings_stay():
    kept, lost = fresh_part(group(([-1, 3, 5], 1), ([4, 5], 0), ([5], 1), ([1], None)), 5, 1)
    assert names(kept.trajectories) == ["g/1", "g/2", "g/3"] and names(lost) == ["g/0"]


def test_a_group_with_one_fresh_trajectory_left_has_no_advantage_and_goes_whole():
    kept, lost = fresh_part(group(([3], 1), ([3], 0), ([5], 1), ([5], None)), 5, 1)
    assert kept is None and names(lost) == ["g/0", "g/1", "g/2"]


def test_a_fresh_group_is_handed_back_as_it_is():
    whole = group(([4], 1), ([5], None))
    assert fresh_part(whole, 5, 1) == (whole, []) and fresh_part(whole, 5, 1)[0] is whole


def test_masked_siblings_do_not_make_rewards_unequal():
    assert group(([0], 1.0), ([0], 1.0), ([0], None)).has_equal_rewards()
    assert not group(([0], 1.0), ([0], 0.0)).has_equal_rewards()
    assert not group(([0], None), ([0], None)).has_equal_rewards()
