"""Advantages of a batch of groups, through verl's registered estimators.

Owns which trajectories take part: masked ones and groups with fewer than two complete siblings have
advantage zero (there is nothing to compare with). The estimator itself is verl's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlpipe.algo import verl_door
from rlpipe.config.algo import AlgoConfig
from rlpipe.types import Group, Trajectory, TrajectoryStatus

_ARGUMENTS = ("token_level_rewards", "response_mask", "index", "norm_adv_by_std_in_grpo")


def compute_advantages(groups: Sequence[Group], config: AlgoConfig) -> list[np.ndarray]:
    """Compute per-token advantages, one float32 array per trajectory, in the order of the groups.

    Each array is parallel to `token_ids` and 0 where loss_mask is 0. The trajectory's reward is
    placed on its last sampled token, as verl's outcome estimators expect.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    result = [np.zeros(len(t.token_ids), dtype=np.float32) for t in trajectories]
    rows, uids = _comparable(groups)
    if not rows:
        return result

    # Outcome estimators read the reward from the last sampled token of a padded grid.
    masks = [np.asarray(trajectories[r].loss_mask, dtype=np.float32) for r in rows]
    width = max(len(m) for m in masks)
    mask, rewards = np.zeros((2, len(rows), width), dtype=np.float32)
    for i, (row, row_mask) in enumerate(zip(rows, masks, strict=True)):
        mask[i, : len(row_mask)] = row_mask
        rewards[i, np.flatnonzero(row_mask)[-1]] = trajectories[row].reward

    values = _estimate(rewards, mask, uids=uids, config=config)
    for i, row in enumerate(rows):
        result[row][:] = values[i, : len(result[row])]
    return result


def check_estimator(config: AlgoConfig) -> None:
    """Refuse, at launch, an estimator that needs more than a batch of groups has.

    Raises ValueError with the reason and the estimators that can be used.
    """
    reason = _obstacle(config)
    if reason:
        names = sorted(verl_door.core_algos().ADV_ESTIMATOR_REGISTRY)
        usable = [name for name in names if not _obstacle(replace(config, advantage=name))]
        raise ValueError(f"algo.advantage={config.advantage!r} {reason}. Use one of {usable}.")


def _obstacle(config: AlgoConfig) -> str:
    """Explain why an estimator cannot be used; empty if it can.

    Its signature shows arguments without a default. Some estimators refuse the default of another argument
    (`config=None`), which shows only in a call, here on a group of two.
    """
    parameters = inspect.signature(verl_door.advantage_estimator(config.advantage)).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in variable}
    if missing := sorted(required - set(_ARGUMENTS)):
        return f"needs {', '.join(missing)}, but rlpipe passes {', '.join(_ARGUMENTS)} only"

    rewards = np.array([[0.0], [1.0]], dtype=np.float32)
    try:
        _estimate(rewards, np.ones_like(rewards), uids=["g", "g"], config=config)
    except Exception as error:  # any exception: the first batch would fail with it
        return f"cannot be computed from {', '.join(_ARGUMENTS)} ({error!r})"
    return ""


def _estimate(rewards: np.ndarray, mask: np.ndarray, *, uids: list[str], config: AlgoConfig) -> np.ndarray:
    """Estimate advantages of responses in groups `uids`, [B, S] as rewards and mask are."""
    import torch

    estimator = verl_door.advantage_estimator(config.advantage)
    values = (torch.from_numpy(rewards), torch.from_numpy(mask), np.array(uids, dtype=object))

    arguments = dict(zip(_ARGUMENTS, (*values, config.normalize_std), strict=True))
    accepted = inspect.signature(estimator).parameters
    advantages, _ = estimator(**{name: value for name, value in arguments.items() if name in accepted})
    return advantages.float().numpy() * mask


def _comparable(groups: Sequence[Group]) -> tuple[list[int], list[str]]:
    """Find the rows (over all trajectories) that have a complete sibling, and their group ids."""
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
    return trajectory.status is TrajectoryStatus.COMPLETE and bool(trajectory.loss_mask.any())
