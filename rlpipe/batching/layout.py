"""Trajectories to one flat micro-batch: which tokens it holds, who follows whom, what is predicted where.

Owns how `rlpipe.batching.micro_batch.MicroBatch` is filled; which trajectories go into one is the batcher's
business. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlpipe.batching.micro_batch import Branch, Candidates, MicroBatch, Path, first_tokens
from rlpipe.types import Trajectory, unrecorded


def lay_out(
    rows: Sequence[int],
    inputs: Sequence[np.ndarray],
    shared: Sequence[int],
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    size: int,
    columns: Sequence[Mapping[str, np.ndarray]] | None = None,
    candidates: bool = False,
    routes: bool = False,
) -> MicroBatch:
    """One trajectory after the other, each as a branch of what it shares with the one before.

    rows: [B] indices into trajectories and advantages. inputs: tokens of each that are read.
    shared: how many of them are those of the row before (the first entry counts for nothing).
    size: tokens to fill the micro-batch up to, with a branch that nobody attends to.
    columns: parallel to trajectories, see `pack`. candidates: lay out top_logprobs. Raises ValueError when
    a trajectory has none. routes: lay out the experts of the rollout.
    """
    branches: list[Branch] = []
    tokens, positions, sources = [], [], []
    path: Path = []  # the trajectory at hand, as pieces of branches
    places = np.zeros(0, dtype=np.int64)  # where each of its tokens lies
    targets = [_sampled(trajectories[i]) for i in rows]
    used = 0
    for own, same, chosen in zip(inputs, [0, *shared[1:]], targets, strict=True):
        fresh = len(own) - same
        path = first_tokens(path, same)
        places = np.concatenate([places[:same], np.arange(used, used + fresh)])
        if fresh:
            branches.append(Branch(length=fresh, context=path))
            path = [*path, (len(branches) - 1, fresh)]
        tokens.append(own[same:])
        positions.append(np.arange(same, len(own)))
        sources.append(places[chosen - 1])
        used += fresh
    if size > used:
        branches.append(Branch(length=size - used, context=[]))
        tokens.append(np.zeros(size - used, dtype=np.int64))
        positions.append(np.arange(size - used))
    mask = np.arange(max(map(len, targets))) < np.array([[len(chosen)] for chosen in targets])

    def of_targets(values: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([v[c] for v, c in zip(values, targets, strict=True)], dtype=dtype)

    def grid(values: np.ndarray) -> np.ndarray:
        cells = np.zeros(mask.shape, dtype=values.dtype)
        cells[mask] = values
        return cells

    return MicroBatch(
        rows=np.array(rows),
        tokens=np.concatenate(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        branches=branches,
        sources=np.concatenate(sources),
        targets=of_targets((trajectories[i].token_ids for i in rows), np.int64),
        mask=mask.astype(np.float32),
        indices=grid(np.concatenate(targets)),
        rollout_logprobs=grid(of_targets((trajectories[i].rollout_logprobs for i in rows), np.float32)),
        advantages=grid(of_targets((advantages[i] for i in rows), np.float32)),
        columns={
            name: np.concatenate([columns[i][name][c] for i, c in zip(rows, targets, strict=True)])
            for name in (columns[rows[0]] if columns else ())
        },
        candidates=_candidates([trajectories[i] for i in rows], targets) if candidates else None,
        routes=_routes([trajectories[i].routes for i in rows], inputs, shared, max(size, used))
        if routes
        else None,
    )


def nothing() -> MicroBatch:
    """One token from which nothing is learnt: it keeps a rank without rows in step with the others."""
    none, token = np.zeros((2, 0), dtype=np.int64), np.zeros((2, 1), dtype=np.int64)
    cells = np.zeros((4, 1, 1), dtype=np.float32)
    return MicroBatch(
        rows=np.array([-1]),
        tokens=token[0],
        positions=token[1],
        branches=[Branch(length=1, context=[])],
        sources=none[0],
        targets=none[1],
        mask=cells[0],
        indices=cells[1].astype(np.int64),
        rollout_logprobs=cells[2],
        advantages=cells[3],
    )


def _routes(
    recorded: Sequence[np.ndarray | None], inputs: Sequence[np.ndarray], shared: Sequence[int], size: int
) -> np.ndarray | None:
    """Routes of a micro-batch of `size` tokens, None without any record; other arguments as of `lay_out`."""
    like = next((routes for routes in recorded if routes is not None), None)
    if like is None:
        return None
    flat = np.full((size, *like.shape[1:]), unrecorded(like), like.dtype)
    used = 0
    for routes, read, same in zip(recorded, inputs, [0, *shared[1:]], strict=True):
        if routes is not None:
            fresh = routes[same : len(read)]
            flat[used : used + len(fresh)] = fresh
        used += len(read) - same
    return flat


def _candidates(trajectories: Sequence[Trajectory], targets: Sequence[np.ndarray]) -> Candidates:
    """Values of the sampled tokens `targets` of each trajectory, one after the other."""
    told: list[list[tuple[int, float]]] = []
    for trajectory, chosen in zip(trajectories, targets, strict=True):
        if trajectory.top_logprobs is None:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r} carries no top_logprobs, which algo.correction "
                "needs: collect with SamplingParams.top_logprobs=CorrectionRule.top_logprobs(vocab_size)."
            )
        told += [trajectory.top_logprobs[place] for place in chosen]
    counts = np.array([len(top) for top in told])
    cells = np.arange(counts.max()) < counts[:, None]
    ids, logprobs = np.full(cells.shape, -1), np.full(cells.shape, -np.inf, dtype=np.float32)
    flat = np.array([pair for top in told for pair in top]).reshape(-1, 2)
    ids[cells], logprobs[cells] = flat[:, 0], flat[:, 1]
    return Candidates(ids=ids, logprobs=logprobs)


def _sampled(trajectory: Trajectory) -> np.ndarray:
    """Indices of the sampled tokens; the first token of all is never predicted."""
    return np.flatnonzero(trajectory.loss_mask[1:]) + 1
