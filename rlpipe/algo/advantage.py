"""Advantages of a batch of groups, through verl's registered estimators.

Owns which trajectories take part: masked ones and groups with fewer than two complete siblings have
advantage zero (there is nothing to compare with). The estimator itself is verl's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np

from rlpipe.algo import verl_door
from rlpipe.config.algo import AlgoConfig
from rlpipe.types import Group, Trajectory, TrajectoryStatus


def compute_advantages(groups: Sequence[Group], config: AlgoConfig) -> list[np.ndarray]:
    """Per-token advantages, one float32 array per trajectory, in the order of the groups.

    Each array is parallel to `token_ids` and 0 where loss_mask is 0. The trajectory's reward is
    placed on its last sampled token, as verl's outcome estimators expect.
    """
    import torch

    estimator = verl_door.advantage_estimator(config.advantage)
    everyone = [t for group in groups for t in group.trajectories]
    result = [np.zeros(len(t.token_ids), dtype=np.float32) for t in everyone]
    rows, uids = _comparable(groups)
    if not rows:
        return result
    masks = [np.asarray(everyone[r].loss_mask, dtype=np.float32) for r in rows]
    width = max(len(m) for m in masks)
    mask, rewards = np.zeros((2, len(rows), width), dtype=np.float32)
    for i, (row, own) in enumerate(zip(rows, masks, strict=True)):
        mask[i, : len(own)] = own
        rewards[i, np.flatnonzero(own)[-1]] = everyone[row].reward
    options = {"index": np.array(uids, dtype=object), "norm_adv_by_std_in_grpo": config.normalize_std}
    accepted = inspect.signature(estimator).parameters
    advantages, _ = estimator(
        token_level_rewards=torch.from_numpy(rewards),
        response_mask=torch.from_numpy(mask),
        **{name: value for name, value in options.items() if name in accepted},
    )
    values = advantages.float().numpy() * mask
    for i, row in enumerate(rows):
        result[row][:] = values[i, : len(result[row])]
    return result


def _comparable(groups: Sequence[Group]) -> tuple[list[int], list[str]]:
    """Rows (over all trajectories) that have a complete sibling, and their group ids."""
    rows: list[int] = []
    uids: list[str] = []
    start = 0
    for number, group in enumerate(groups):
        complete = [start + i for i, t in enumerate(group.trajectories) if _complete(t)]
        if len(complete) >= 2:
            rows += complete
            uids += [f"{number}:{group.prompt.group_id}"] * len(complete)
        start += len(group.trajectories)
    return rows, uids


def _complete(trajectory: Trajectory) -> bool:
    return trajectory.status is TrajectoryStatus.COMPLETE and any(trajectory.loss_mask)
