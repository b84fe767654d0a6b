"""Group-normalised advantages: who takes part, and the numbers."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace

import numpy as np
import pytest

from rlpipe.algo.advantage import check_estimator, compute_advantages
from rlpipe.config.algo import AlgoConfig, Credit
from rlpipe.types import FinishReason, GenerateResult, Group, Prompt, SpecCounts, Trajectory, TrajectoryStatus
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.unit


def groups_with_rewards(*rewards: list[float]):
    groups = make_groups(groups=len(rewards), siblings=len(rewards[0]))
    for group, values in zip(groups, rewards, strict=True):
        for trajectory, reward in zip(group.trajectories, values, strict=True):
            trajectory.reward = reward
    return groups


def per_trajectory(groups, config=None):
    """The one advantage of each trajectory, after checking that it stands on sampled tokens alone."""
    values = compute_advantages(groups, config or AlgoConfig())
    flat = [t for g in groups for t in g.trajectories]
    for trajectory, own in zip(flat, values, strict=True):
        mask = np.array(trajectory.loss_mask, dtype=bool)
        assert len(own) == len(trajectory.token_ids)
        assert np.all(own[~mask] == 0) and np.all(own[mask] == own[mask][0])
    return [own[np.flatnonzero(t.loss_mask)[0]] for t, own in zip(flat, values, strict=True)]


def test_advantages_are_rewards_normalised_within_their_group():
    rewards = [1.0, 0.0, 0.0, 3.0], [5.0, 5.0, 6.0, 4.0]
    expected = [(np.array(r) - np.mean(r)) / (np.std(r, ddof=1) + 1e-6) for r in rewards]
    np.testing.assert_allclose(
        per_trajectory(groups_with_rewards(*rewards)), np.concatenate(expected), rtol=1e-5
    )


def test_dr_grpo_leaves_out_the_standard_deviation():
    found = per_trajectory(groups_with_rewards([1.0, 0.0, 0.0, 3.0]), AlgoConfig(normalize_std=False))
    np.testing.assert_allclose(found, [0.0, -1.0, -1.0, 2.0])


def test_equal_rewards_teach_nothing():
    assert per_trajectory(groups_with_rewards([1.0, 1.0, 1.0])) == [0.0, 0.0, 0.0]


def test_a_masked_trajectory_is_left_out_and_does_not_move_its_siblings():
    groups = groups_with_rewards([1.0, 0.0, 0.0, 0.0])
    masked = groups[0].trajectories[3]
    masked.status, masked.reward = TrajectoryStatus.MASKED, None
    alone = per_trajectory(groups_with_rewards([1.0, 0.0, 0.0]))
    np.testing.assert_allclose(per_trajectory(groups), [*alone, 0.0])


def test_a_group_with_one_complete_trajectory_has_advantage_zero():
    groups = groups_with_rewards([1.0, 0.0])
    groups[0].trajectories[1] = replace(
        groups[0].trajectories[1], status=TrajectoryStatus.MASKED, reward=None
    )
    assert per_trajectory(groups) == [0.0, 0.0]


def test_two_admissions_of_one_prompt_are_two_groups():
    groups = groups_with_rewards([1.0, 0.0], [3.0, 3.0])
    groups[1].prompt = groups[0].prompt
    assert per_trajectory(groups)[2:] == [0.0, 0.0]


def test_other_estimators_are_reached_by_name():
    found = per_trajectory(groups_with_rewards([1.0, 0.0, 0.0, 0.0]), AlgoConfig(advantage="rloo"))
    np.testing.assert_allclose(found, [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("gae", "needs gamma, lam, values"),
        ("remax", "needs reward_baselines"),
        ("optimal_token_baseline", "needs old_log_probs, sum_pi_squared"),
        ("reinforce_plus_plus", "cannot be computed"),
        ("grpo_passk", "cannot be computed"),
    ],
)
def test_an_estimator_that_wants_what_no_batch_has_is_refused_at_launch(name, lacks):
    with pytest.raises(ValueError, match=rf"algo.advantage='{name}' {lacks}.*Use one of \[.*'grpo'.*'rloo'"):
        check_estimator(AlgoConfig(advantage=name))


def test_every_estimator_that_is_offered_gives_advantages():
    with pytest.raises(ValueError, match="Use one of") as refused:
        check_estimator(AlgoConfig(advantage="gae"))
    offered = literal_eval(str(refused.value).rpartition("Use one of ")[2].rstrip("."))
    assert {"grpo", "rloo", "reinforce_plus_plus_baseline"} <= set(offered)
    for name in offered:
        config = AlgoConfig(advantage=name)
        check_estimator(config)
        values = compute_advantages(groups_with_rewards([1.0, 0.0, 0.0, 3.0]), config)
        assert all(np.isfinite(own).all() for own in values) and any(own.any() for own in values), name


def group_of_turns(*rewards: list[float]) -> Group:
    """A group whose trajectory i has a turn of two tokens, after one of context, for each of rewards[i]."""
    trajectories = []
    for number, earned in enumerate(rewards):
        trajectory = Trajectory(
            trajectory_id=f"g/{number}", group_id="g", instance_id="i", reward=sum(earned)
        )
        for _ in earned:
            trajectory.append_context([1])
            columns = {name: [0.0, 0.0] for name in ("logprobs", "entropies", "versions")}
            finish, spec = FinishReason.STOP, SpecCounts()
            trajectory.append_sampled(
                GenerateResult(request_id="r", output_ids=[5, 6], finish_reason=finish, spec=spec, **columns)
            )
        trajectory.turn_rewards = list(earned)
        trajectories.append(trajectory)
    return Group(prompt=Prompt(instance_id="i", group_id="g"), trajectories=trajectories)


def by_turn(group: Group, **settings: object) -> list[list[float]]:
    """The advantage of each turn, after checking that all of its tokens have it and no others."""
    turns = []
    values = compute_advantages([group], AlgoConfig(credit=Credit.TURN, **settings))
    for trajectory, own in zip(group.trajectories, values, strict=True):
        assert np.all(own[~trajectory.loss_mask] == 0)
        pairs = own[trajectory.loss_mask].reshape(-1, 2)
        assert np.all(pairs[:, 0] == pairs[:, 1])
        turns.append(pairs[:, 0].tolist())
    return turns


def test_a_turn_that_alone_earns_is_alone_credited():
    """Two turns; only the first one earns, and half of the siblings do it right."""
    found = by_turn(group_of_turns([1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]))
    good, bad = found[0], found[1]
    assert good[0] > 0.8 and bad[0] < -0.8 and good[1] == bad[1] == 0.0
    episode = compute_advantages([group_of_turns([1.0, 0.0], [0.0, 0.0])], AlgoConfig())
    assert episode[0][-1] != 0, "credit by episode reinforces the second turn as well"


def test_credit_by_turn_is_the_return_to_go_over_the_siblings_at_that_turn():
    rewards = [[1.0, 2.0, 4.0], [0.5, 0.25], [3.0], [0.0, 1.0, 0.0]]
    to_go = [[7.0, 6.0, 4.0], [0.75, 0.25], [3.0], [1.0, 1.0, 0.0]]
    for advantage in ("grpo", "rloo"):
        found = by_turn(group_of_turns(*rewards), advantage=advantage)
        for turn in range(3):
            # A sibling that ended earlier counts with its last turn.
            returns = np.array([own[min(turn, len(own) - 1)] for own in to_go])
            baseline = returns - returns.mean()
            scale = 1 / (returns.std(ddof=1) + 1e-6) if advantage == "grpo" else 4 / 3
            here = [i for i, own in enumerate(to_go) if turn < len(own)]
            np.testing.assert_allclose([found[i][turn] for i in here], baseline[here] * scale, rtol=1e-5)


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_credit_by_turn_equals_credit_by_episode_when_only_last_turns_earn(advantage):
    group = group_of_turns([0.0, 0.0, 2.0], [1.0], [0.0, 5.0], [0.0, 0.0])
    by_turns, by_episode = (
        compute_advantages([group], AlgoConfig(credit=credit, advantage=advantage)) for credit in Credit
    )
    for one, other in zip(by_turns, by_episode, strict=True):
        np.testing.assert_array_equal(one, other)


def test_trajectories_without_recorded_turns_are_credited_by_episode():
    config = AlgoConfig(credit=Credit.TURN)
    assert per_trajectory(groups_with_rewards([1.0, 0.0]), config) == per_trajectory(
        groups_with_rewards([1.0, 0.0])
    )


def test_siblings_on_one_side_of_a_game_are_compared_with_each_other_alone():
    groups = groups_with_rewards([1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    for number, trajectory in enumerate(groups[0].trajectories):
        trajectory.side = number % 2
    first = per_trajectory(groups_with_rewards([1.0, 1.0, 0.0]))
    second = per_trajectory(groups_with_rewards([-1.0, 1.0, -1.0]))
    expected = [side[n] for n in range(3) for side in (first, second)]
    np.testing.assert_allclose(per_trajectory(groups), expected, rtol=1e-6)

    # A side that always wins has learnt nothing new, whatever the other one did.
    led = groups_with_rewards([1.0, -1.0, 1.0, -1.0])
    for number, trajectory in enumerate(led[0].trajectories):
        trajectory.side = number % 2
    assert per_trajectory(led) == [0.0] * 4 and led[0].has_equal_rewards()
