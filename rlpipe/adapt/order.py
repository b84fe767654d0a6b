"""Chooses the trajectories and tokens that a step trains on, as pure functions of (seed, step).

Owns the order, so that a resumed run sees the same batches as an uninterrupted one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rlpipe.types import Trajectory


class DataOrder:
    """Seeded epochs over trajectories, with each trajectory once per epoch; a batch may span two epochs.

    context_weight: see `AdaptConfig`. In a batch, each stretch of context counts with this probability, as if
    it had been sampled. The expected gradient is the same as with this weight on context tokens, and a chain
    of drafts is never counted in part.
    """

    def __init__(
        self, trajectories: Sequence[Trajectory], batch: int, *, seed: int, context_weight: float = 0.0
    ) -> None:
        if not trajectories:
            raise ValueError(
                "there is no trajectory to train on: every rollout was masked, or adapt.data empty."
            )
        self._trajectories, self._batch, self._seed = trajectories, batch, seed
        self._context_weight = context_weight
        self._orders: dict[int, list[int]] = {}

    def __getitem__(self, step: int) -> list[Trajectory]:
        """Return the batch of a step (0-based)."""
        rng = random.Random(f"{self._seed}/context/{step}")
        positions = range(step * self._batch, (step + 1) * self._batch)
        chosen = [self._trajectories[self._index(position)] for position in positions]
        return [with_context(t, self._context_weight, rng) for t in chosen]

    def epoch(self, step: int) -> float:
        """Return the number of passes over the data after `step` steps."""
        return step * self._batch / len(self._trajectories)

    def _index(self, position: int) -> int:
        """Return the index of the trajectory at a position of the endless sequence of epochs."""
        epoch, within = divmod(position, len(self._trajectories))
        if epoch not in self._orders:
            order = list(range(len(self._trajectories)))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)

            # A batch may span two epochs, so keep the previous order too.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch][within]


def with_context(trajectory: Trajectory, weight: float, rng: random.Random) -> Trajectory:
    """Return a copy in which each stretch of context counts with probability `weight`.

    One token at each end of a stretch is excluded, so that turns remain separate: an engine never drafts from
    one turn into the next.

    >>> mask = [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    >>> chat = Trajectory(trajectory_id="t", group_id="g", instance_id="i", loss_mask=mask)
    >>> with_context(chat, 1.0, random.Random(0)).loss_mask.astype(int)
    array([0, 1, 1, 0, 1, 1, 0, 1, 0, 1])
    """
    if not weight:
        return trajectory

    mask, start = trajectory.loss_mask.copy(), 0
    for sampled, stretch in groupby(trajectory.loss_mask.tolist()):
        stop = start + len(list(stretch))
        if not sampled and rng.random() < weight:
            last = stop if stop == len(mask) else stop - 1
            mask[start + 1 : last] = True
        start = stop
    return replace(trajectory, loss_mask=mask)
