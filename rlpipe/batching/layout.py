"""The layout of trajectories in one flat micro-batch: its tokens, their predecessors, and their predictions.

Owns the filling of `rlpipe.batching.micro_batch.MicroBatch`; `packing` chooses its trajectories.
numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlpipe.batching.micro_batch import Branch, Candidates, MicroBatch, Path, first_tokens
from rlpipe.types import Trajectory, unrecorded


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainingData:
    """The data that fills micro-batches; all sequences are parallel to the trajectories.

    advantages: per token.
    columns: further numbers per token by name; None or empty if there are none.
    candidates: whether to lay out top_logprobs.
    routes: whether to lay out the experts that read each token in the rollout, if they are recorded.
    origins: if the trajectories are segments, for each one the index of its trajectory, and the index of its
        first token in that trajectory; None if they are full trajectories.
    """

    trajectories: Sequence[Trajectory]
    advantages: Sequence[np.ndarray]
    columns: Sequence[Mapping[str, np.ndarray]] | None = None
    candidates: bool = False
    routes: bool = False
    origins: Sequence[tuple[int, int]] | None = None


def by_segment(data: TrainingData) -> TrainingData:
    """Return the same data with each segment as a separate trajectory (`Trajectory.segment_starts`)."""
    if not any(t.segment_starts for t in data.trajectories):
        return data

    cuts = [(i, tokens) for i, t in enumerate(data.trajectories) for tokens in t.segments()]
    columns = data.columns and [
        {name: values[tokens] for name, values in data.columns[i].items()} for i, tokens in cuts
    ]
    return replace(
        data,
        trajectories=[data.trajectories[i].segment(tokens) for i, tokens in cuts],
        advantages=[data.advantages[i][tokens] for i, tokens in cuts],
        columns=columns,
        origins=[(i, tokens.start) for i, tokens in cuts],
    )


def lay_out(
    data: TrainingData,
    rows: Sequence[int],
    *,
    inputs: Sequence[np.ndarray],
    shared: Sequence[int],
    size: int,
) -> MicroBatch:
    """Lay out trajectories in order, each as a branch after its common prefix with the previous trajectory.

    Args:
        data: the data of all trajectories.
        rows: [B] indices of the trajectories to lay out.
        inputs: for each row, the tokens that the model reads.
        shared: for each row, how many of these tokens the previous row also has (the first entry is ignored).
        size: number of tokens to which the micro-batch is padded, with a branch to which no token attends.

    Raises:
        ValueError: candidates are requested and a trajectory has no top_logprobs.
    """
    trajectories = [data.trajectories[i] for i in rows]
    shared = [0, *shared[1:]]
    branches: list[Branch] = []
    tokens, positions, sources = [], [], []
    path: Path = []  # the current trajectory, as spans of branches
    token_indices = np.zeros(0, dtype=np.int64)  # indices of its tokens in the micro-batch
    targets = [_sampled(trajectory) for trajectory in trajectories]
    used = 0

    for read, same, sampled in zip(inputs, shared, targets, strict=True):
        fresh = len(read) - same
        path = first_tokens(path, same)
        token_indices = np.concatenate([token_indices[:same], np.arange(used, used + fresh)])
        if fresh:
            branches.append(Branch(length=fresh, context=path))
            path = [*path, (len(branches) - 1, fresh)]

        # A sampled token is predicted at the token before it, which may belong to another branch.
        tokens.append(read[same:])
        positions.append(np.arange(same, len(read)))
        sources.append(token_indices[sampled - 1])
        used += fresh

    if size > used:
        branches.append(Branch(length=size - used, context=[]))
        tokens.append(np.zeros(size - used, dtype=np.int64))
        positions.append(np.arange(size - used))

    mask = np.arange(max(map(len, targets))) < np.array([[len(sampled)] for sampled in targets])

    def of_targets(values: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([v[sampled] for v, sampled in zip(values, targets, strict=True)], dtype=dtype)

    def grid(values: np.ndarray) -> np.ndarray:
        padded = np.zeros(mask.shape, dtype=values.dtype)
        padded[mask] = values
        return padded

    columns = [data.columns[i] for i in rows] if data.columns else []
    origins = [data.origins[i] if data.origins else (i, 0) for i in rows]
    logprobs = of_targets((t.rollout_logprobs for t in trajectories), np.float32)
    return MicroBatch(
        rows=np.array([row for row, _ in origins]),
        tokens=np.concatenate(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        branches=branches,
        sources=np.concatenate(sources),
        targets=of_targets((t.token_ids for t in trajectories), np.int64),
        mask=mask.astype(np.float32),
        indices=grid(np.concatenate([t + start for t, (_, start) in zip(targets, origins, strict=True)])),
        rollout_logprobs=grid(logprobs),
        advantages=grid(of_targets((data.advantages[i] for i in rows), np.float32)),
        columns={
            name: np.concatenate([values[name][s] for values, s in zip(columns, targets, strict=True)])
            for name in (columns[0] if columns else ())
        },
        candidates=_candidates(trajectories, targets) if data.candidates else None,
        routes=_routes([t.routes for t in trajectories], inputs, shared=shared, size=max(size, used))
        if data.routes
        else None,
    )


def empty_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token without a prediction; it keeps an idle rank in step with others."""
    no_tokens, token = np.zeros((2, 0), dtype=np.int64), np.zeros((2, 1), dtype=np.int64)
    grids = np.zeros((4, 1, 1), dtype=np.float32)
    return MicroBatch(
        rows=np.array([-1]),
        tokens=token[0],
        positions=token[1],
        branches=[Branch(length=1, context=[])],
        sources=no_tokens[0],
        targets=no_tokens[1],
        mask=grids[0],
        indices=grids[1].astype(np.int64),
        rollout_logprobs=grids[2],
        advantages=grids[3],
    )


def _routes(
    recorded: Sequence[np.ndarray | None],
    inputs: Sequence[np.ndarray],
    *,
    shared: Sequence[int],
    size: int,
) -> np.ndarray | None:
    """Return the routes of a micro-batch of `size` tokens; None if no routes are recorded. See `lay_out`."""
    like = next((routes for routes in recorded if routes is not None), None)
    if like is None:
        return None

    flat = np.full((size, *like.shape[1:]), unrecorded(like), like.dtype)
    used = 0
    for routes, read, same in zip(recorded, inputs, shared, strict=True):
        if routes is not None:
            fresh = routes[same : len(read)]
            flat[used : used + len(fresh)] = fresh
        used += len(read) - same
    return flat


def _candidates(trajectories: Sequence[Trajectory], targets: Sequence[np.ndarray]) -> Candidates:
    """Return the candidates of the sampled tokens `targets` of each trajectory, concatenated."""
    candidates: list[list[tuple[int, float]]] = []
    for trajectory, sampled in zip(trajectories, targets, strict=True):
        if trajectory.top_logprobs is None:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id!r} carries no top_logprobs, which algo.correction "
                "needs: collect with SamplingParams.top_logprobs=CorrectionRule.top_logprobs(vocab_size)."
            )
        candidates += [trajectory.top_logprobs[index] for index in sampled]

    # Tokens may have different numbers of candidates, so the rows are padded on the right.
    counts = np.array([len(top) for top in candidates])
    filled = np.arange(counts.max()) < counts[:, None]
    ids, logprobs = np.full(filled.shape, -1), np.full(filled.shape, -np.inf, dtype=np.float32)
    flat = np.array([pair for top in candidates for pair in top]).reshape(-1, 2)
    ids[filled], logprobs[filled] = flat[:, 0], flat[:, 1]
    return Candidates(ids=ids, logprobs=logprobs)


def _sampled(trajectory: Trajectory) -> np.ndarray:
    """Return the indices of the sampled tokens, without the first token, which is never predicted."""
    return np.flatnonzero(trajectory.loss_mask[1:]) + 1
