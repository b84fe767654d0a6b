"""Advantages of a batch of groups, through verl's registered estimators.

With algo.credit=turn, the tokens of turn k of trajectory i are credited with the rewards from that turn on:

    G_ik = sum_{j >= k} r_ij,    A_ik = estimator over siblings i' of G_{i', min(k, K_i')},

where K_i' is the last turn of sibling i'. A sibling that ended before turn k counts with its last turn, so
every turn is compared with the full group. With grpo, A_ik = (G_ik - mean) / std of these returns. If only
last turns have a reward, every G_ik is the trajectory's reward, and the result equals algo.credit=episode.
Source: REINFORCE with baseline (Sutton & Barto 2018, 13.3 and 13.4) without discount; each turn is a step.

Owns the choice of trajectories: masked trajectories, and groups with fewer than two complete siblings, have
advantage zero, because a comparison is not possible. If the policy plays all sides of a game, the siblings on
each side are a separate group, so that an advantage from the rules of the game is not credited to the policy
(the role-conditioned baseline of SPIRAL, arXiv 2506.24119, with the group's mean instead of a running mean).
The estimator itself is verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.algo import verl_door
from rlpipe.algo.user_functions import (
    ADVANTAGE,
    ARGUMENTS,
    accepted,
    check_grid,
    rehearsed,
    required_arguments,
    user_function,
)
from rlpipe.config.algo import AlgoConfig, Credit
from rlpipe.config.user_code import is_user_code
from rlpipe.types import Group, Trajectory

_ARGUMENTS = ARGUMENTS[ADVANTAGE]


def compute_advantages(groups: Sequence[Group], config: AlgoConfig) -> list[np.ndarray]:
    """Compute per-token advantages: one float32 array per trajectory, in the order of the groups.

    Each array is parallel to `token_ids` and 0 where loss_mask is 0. Rewards are placed on the last sampled
    token, as verl's outcome estimators expect.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    result = [np.zeros(len(t.token_ids), dtype=np.float32) for t in trajectories]
    rows, uids = _comparable(groups)
    if not rows:
        return result

    masks = [np.asarray(trajectories[r].loss_mask, dtype=np.float32) for r in rows]
    width = max(len(m) for m in masks)
    mask = np.zeros((len(rows), width), dtype=np.float32)
    for i, row_mask in enumerate(masks):
        mask[i, : len(row_mask)] = row_mask

    # Estimate turn k of every trajectory at once. With credit by episode there is only one turn.
    turns = [_turns(trajectories[row], config.credit) for row in rows]
    previous: list[float] | None = None
    values = mask
    for k in range(max(map(len, turns))):
        returns = [of_one[min(k, len(of_one) - 1)][1] for of_one in turns]
        if returns != previous:
            values = _estimate(_at_last_tokens(returns, mask), mask, uids=uids, config=config)
            previous = returns

        for i, (row, of_one) in enumerate(zip(rows, turns, strict=True)):
            if k < len(of_one):
                tokens = of_one[k][0]
                result[row][tokens] = values[i, : len(result[row])][tokens]
    return result


def _turns(trajectory: Trajectory, credit: Credit) -> list[tuple[slice, float]]:
    """Return each turn's tokens and the sum of rewards from that turn on; with credit=episode, one turn."""
    reward = trajectory.reward
    assert reward is not None, "complete trajectories have a reward"
    ends, rewards = trajectory.turn_ends, trajectory.turn_rewards
    if credit is Credit.EPISODE or not ends or len(ends) != len(rewards):
        return [(slice(None), reward)]

    # Tokens of the context have no advantage, so the slice of a turn may include the context before it.
    to_go = np.cumsum(np.asarray(rewards, np.float64)[::-1])[::-1]
    return [
        (slice(start, end), float(earned))
        for start, end, earned in zip([0, *ends[:-1]], ends, to_go, strict=True)
    ]


def _at_last_tokens(returns: Sequence[float], mask: np.ndarray) -> np.ndarray:
    """Place each row's return on its last sampled token, where outcome estimators read it."""
    rewards = np.zeros_like(mask)
    for row, (earned, of_row) in enumerate(zip(returns, mask, strict=True)):
        rewards[row, np.flatnonzero(of_row)[-1]] = earned
    return rewards


def check_estimator(config: AlgoConfig) -> None:
    """Refuse, at launch, an estimator that needs data other than a batch of groups.

    Raises ValueError with the reason and the estimators that can be used.
    """
    if is_user_code(config.advantage):
        rehearsed(ADVANTAGE, config.advantage, lambda: _rehearse(config))
        return

    reason = _obstacle(config)
    if reason:
        names = sorted(verl_door.core_algos().ADV_ESTIMATOR_REGISTRY)
        usable = [name for name in names if not _obstacle(replace(config, advantage=name))]
        raise ValueError(f"algo.advantage={config.advantage!r} {reason}. Use one of {usable}.")


def _obstacle(config: AlgoConfig) -> str:
    """Explain why an estimator cannot be used; empty if it can.

    The signature shows which arguments have no default. Some estimators also refuse the default of an
    argument (`config=None`). Only a call reveals this, so the estimator is called on a group of two.
    """
    required = required_arguments(verl_door.advantage_estimator(config.advantage))
    if missing := sorted(required - set(_ARGUMENTS)):
        return f"needs {', '.join(missing)}, but rlpipe passes {', '.join(_ARGUMENTS)} only"

    rewards = np.array([[0.0], [1.0]], dtype=np.float32)
    try:
        _estimate(rewards, np.ones_like(rewards), uids=["g", "g"], config=config)
    except Exception as error:  # every exception counts: the first batch would raise it, too
        return f"cannot be computed from {', '.join(_ARGUMENTS)} ({error!r})"
    return ""


def _rehearse(config: AlgoConfig) -> None:
    """Call a user's advantage on two groups of answers of different lengths; one group has equal rewards."""
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]], dtype=np.float32)
    rewards = np.zeros_like(mask)
    rewards[0, 2], rewards[2, 2], rewards[3, 1] = 1.0, 0.5, 0.5
    _estimate(rewards, mask, uids=["a", "a", "b", "b"], config=config)


def _estimator(name: str) -> Callable[..., Any]:
    return user_function(ADVANTAGE, name) if is_user_code(name) else verl_door.advantage_estimator(name)


def _estimate(rewards: np.ndarray, mask: np.ndarray, *, uids: list[str], config: AlgoConfig) -> np.ndarray:
    """Estimate advantages [B, S] of responses. rewards, mask: [B, S]. uids: group of each response."""
    import torch

    # A user's function may write into its arguments.
    grids = (torch.from_numpy(rewards.copy()), torch.from_numpy(mask.copy()))
    arguments = dict(
        zip(_ARGUMENTS, (*grids, np.array(uids, dtype=object), config.normalize_std), strict=True)
    )

    estimator = _estimator(config.advantage)
    returned = estimator(**accepted(estimator, arguments))
    advantages: Any = returned[0] if isinstance(returned, tuple) and returned else returned
    if is_user_code(config.advantage):
        advantages = check_grid(ADVANTAGE, config.advantage, advantages, torch.from_numpy(mask))
    return advantages.detach().float().numpy() * mask


def _comparable(groups: Sequence[Group]) -> tuple[list[int], list[str]]:
    """Return the indices of the trajectories that can be compared with a sibling, and their group ids."""
    rows: list[int] = []
    uids: list[str] = []
    start = 0
    for number, group in enumerate(groups):
        for side, indices in enumerate(group.sides()):
            compared = [start + i for i in indices if group.trajectories[i].loss_mask.any()]
            if len(compared) >= 2:
                rows += compared
                uids += [f"{number}:{group.prompt.group_id}:{side}"] * len(compared)
        start += len(group.trajectories)
    return rows, uids
