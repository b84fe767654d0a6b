"""Expected acceptance of a draft on recorded rollouts, exact given their tokens, without generation.

Owns the step from the trainer's tables (`rlpipe.trainer.draft`) to expected counts by prompt. One pass of
target and draft gives, for every token, the probability that a draft token there would have been accepted:

    rejection      min(1, q(x) / p(x))
    target-only    1 if x is the argmax of q, else 0

The visit recursion (`rlpipe.drafts.visit`) turns these probabilities into expected verify steps. The model is
frozen, so all evaluations use the same rollouts, and two drafts are compared on the same tokens. From the
second depth on, the trainer's draft attends to keys of the same depth, but the engine's draft attends to keys
of the first depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpipe.adapt.estimates import ExpectedCounts
from rlpipe.types import Trajectory

Table = tuple[np.ndarray, dict[str, np.ndarray]]  # positions [n], statistics [n, K] by name
ACCEPT = {"rejection": "accept", "target_only": "top"}  # column of the tables, by mode


def expected_counts(
    trajectories: Sequence[Trajectory], tables: Sequence[Table | None], *, gamma: int, mode: str
) -> dict[str, ExpectedCounts]:
    """Compute an engine's expected counts in these trajectories under a mode, by instance.

    Args:
        trajectories: recorded from the target.
        tables: one for each trajectory; None if it has no context.
        gamma: draft tokens of a verify step, at most the depths of the tables.
        mode: one of `ACCEPT`.
    """
    import torch

    from rlpipe.drafts.visit import forecast

    rows = [(t, *table) for t, table in zip(trajectories, tables, strict=True) if table is not None]
    if not rows:
        return {}

    # Pad rows to the longest; a gap between positions marks the start of a turn.
    longest = max(len(positions) for _, positions, _ in rows)
    accept = np.zeros((len(rows), longest, gamma))
    mask, starts = np.zeros(accept.shape, bool), np.zeros(accept.shape[:2], bool)
    for row, (_, positions, values) in enumerate(rows):
        column, size = values[ACCEPT[mode]][:, :gamma], len(positions)
        mask[row, :size] = ~np.isnan(column)
        accept[row, :size] = np.nan_to_num(column)
        starts[row, :size] = np.diff(positions, prepend=-1) != 1
        starts[row, 0] = True
    expected = forecast(torch.from_numpy(accept), torch.from_numpy(mask), torch.from_numpy(starts))

    by_instance: dict[str, ExpectedCounts] = {}
    for row, (trajectory, _, _) in enumerate(rows):
        counts = by_instance.setdefault(
            trajectory.instance_id, ExpectedCounts(drafted=[0.0] * gamma, accepted=[0.0] * gamma)
        )
        for total, added in ((counts.drafted, expected.drafted), (counts.accepted, expected.accepted)):
            total[:] = [x + y for x, y in zip(total, added[row].tolist(), strict=True)]
        counts.verify_steps += float(expected.verify_steps[row])
        counts.emitted += float(expected.emitted[row])
    return by_instance


def mean_overlap(tables: Sequence[Table | None], gamma: int) -> list[float | None]:
    """Compute the mean of sum_v min(p, q) by depth over all contexts; None for a depth without contexts."""
    filled = [table[1]["rejection"][:, :gamma] for table in tables if table is not None]
    if not filled:
        return [None] * gamma
    column = np.concatenate(filled)
    known = ~np.isnan(column)
    sums, counts = np.where(known, column, 0).sum(0), known.sum(0)
    return [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
