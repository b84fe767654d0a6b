"""Advantages of any groups: they sum to zero in each, and nothing outside a group moves them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algo.advantage import compute_advantages
from rlpipe.config.algo import AlgoConfig
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.property

MEMBERS = st.tuples(
    st.integers(-20, 20).map(lambda n: n / 4),  # reward
    st.lists(st.booleans(), min_size=1, max_size=6),  # which tokens were sampled
    st.sampled_from([TrajectoryStatus.COMPLETE] * 4 + [TrajectoryStatus.MASKED]),
)
GROUPS = st.lists(st.lists(MEMBERS, min_size=1, max_size=6), min_size=1, max_size=4)
CONFIGS = st.sampled_from([AlgoConfig(), AlgoConfig(normalize_std=False), AlgoConfig(advantage="rloo")])


def build(drawn) -> list[Group]:
    groups = []
    for g, members in enumerate(drawn):
        trajectories = [
            Trajectory(
                trajectory_id=f"{g}/{i}",
                group_id=str(g),
                instance_id="i",
                token_ids=list(range(len(sampled))),
                loss_mask=[int(x) for x in sampled],
                reward=None if status is TrajectoryStatus.MASKED else reward,
                status=status,
            )
            for i, (reward, sampled, status) in enumerate(members)
        ]
        groups.append(Group(prompt=Prompt(instance_id="i", group_id=str(g)), trajectories=trajectories))
    return groups


def by_group(groups: list[Group], values: list[np.ndarray]) -> list[list[tuple[Trajectory, np.ndarray]]]:
    rest = iter(values)
    return [[(t, next(rest)) for t in group.trajectories] for group in groups]


@given(GROUPS, CONFIGS)
@settings(max_examples=150, deadline=None)
def test_advantages_sum_to_zero_in_each_group_and_rank_as_rewards_do(drawn, config):
    groups = build(drawn)
    for members in by_group(groups, compute_advantages(groups, config)):
        of_trajectory = []
        for trajectory, own in members:
            mask = np.array(trajectory.loss_mask, dtype=bool)
            assert own.shape == mask.shape and not own[~mask].any()
            if trajectory.status is TrajectoryStatus.MASKED or not mask.any():
                assert not own.any()
                continue
            assert (own[mask] == own[mask][0]).all()
            of_trajectory.append((trajectory.reward, float(own[mask][0])))
        assert sum(a for _, a in of_trajectory) == pytest.approx(0, abs=1e-4)
        rewards = [r for r, _ in of_trajectory]
        if len(rewards) > 1 and len(set(rewards)) > 1:
            best, worst = max(of_trajectory), min(of_trajectory)
            assert best[1] > 0 > worst[1]
        else:
            assert all(a == pytest.approx(0, abs=1e-4) for _, a in of_trajectory)


@given(GROUPS, CONFIGS)
@settings(max_examples=50, deadline=None)
def test_a_group_has_the_same_advantages_alone_and_in_company(drawn, config):
    groups = build(drawn)
    together = by_group(groups, compute_advantages(groups, config))
    for group, members in zip(groups, together, strict=True):
        for (_, own), alone in zip(members, compute_advantages([group], config), strict=True):
            np.testing.assert_allclose(own, alone, atol=1e-6)
