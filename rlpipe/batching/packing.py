"""Cuts a batch into flat micro-batches, and counts totals that make the loss independent of the cuts.

Owns the choice of trajectories, their distribution to data parallel ranks and minibatches, and the filling of
micro-batches under a token budget; `layout` owns their layout. numpy only; uses no model and no loss. Flow:

1. Split trajectories into segments, and drop those that cannot be trained on.
2. Shuffle them into minibatches.
3. Sort each minibatch in lexicographic order of its tokens, so that neighbours share the most tokens.
4. Give every rank a consecutive stretch of the minibatch.
5. Cut the stretch into micro-batches where neighbours share the fewest tokens.

Invariants: every trainable token is in exactly one micro-batch of each pass; no micro-batch has more
tokens than the budget; every rank of a minibatch has the same number of micro-batches (a rank with too few
rows gets empty micro-batches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from rlpipe.batching.layout import TrainingData, by_segment, empty_micro_batch, lay_out
from rlpipe.batching.micro_batch import MicroBatch, MiniBatch, PackedBatch
from rlpipe.types import Trajectory, TrajectoryStatus

PASS_COST = 64  # fixed cost of a forward and backward pass, in tokens
MULTIPLE = 32  # micro-batches are padded to a multiple, so that kernels prepared for a size are used again


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray] | None,
    token_budget: int,
    *,
    dp_size: int = 1,
    minibatches: int = 1,
    temperature: float = 1.0,
    skip_zero_advantage: bool = False,
    draft_learns: bool = False,
    share_prefixes: bool = True,
    columns: Sequence[Mapping[str, np.ndarray]] | None = None,
    candidates: bool = False,
    routes: bool = False,
    seed: int = 0,
) -> PackedBatch:
    """Cut trajectories into micro-batches of at most `token_budget` tokens; shared tokens count once.

    Masked trajectories and trajectories without a sampled token are left out. Each segment of a trajectory is
    a separate sequence, in the minibatches and in `MiniBatch.sequences`.

    Args:
        trajectories: in any order.
        advantages: per token, parallel to each trajectory's token_ids (None: all zero, to compute only
            logprobs).
        token_budget: maximum number of tokens of a micro-batch.
        dp_size: number of data parallel ranks.
        minibatches: number of optimizer steps of a pass; trajectories are assigned to them at random.
        temperature: the rollout's temperature.
        skip_zero_advantage: leave out trajectories with only zero advantages; they still count in the totals.
        draft_learns: pack the left-out trajectories for the draft only (`MiniBatch.draft_shards`).
        share_prefixes: run common prefixes only once. If False, the budget limits the tokens of rows that are
            padded to the longest row (see `MegatronTrainer.shares_prefixes`).
        columns, candidates, routes: see `TrainingData`.
        seed: seed of the random assignment to minibatches.

    Raises:
        ValueError: a trajectory exceeds the budget, or lacks top_logprobs although candidates are requested.
    """
    lengths = [len(t.token_ids) for t in trajectories]
    batch = PackedBatch(minibatches=[], lengths=lengths, temperature=temperature)
    if advantages is None:
        advantages = [np.zeros(length, dtype=np.float32) for length in lengths]
    data = by_segment(
        TrainingData(
            trajectories=trajectories,
            advantages=advantages,
            columns=columns,
            candidates=candidates,
            routes=routes,
        )
    )
    trajectories, advantages = data.trajectories, data.advantages

    rows = [i for i, t in enumerate(trajectories) if trainable(t)]
    # Tokens from the last sampled one on are cut off, because no prediction reads them.
    inputs = {i: _inputs(trajectories[i]) for i in rows}
    _check_budget(inputs, trajectories, token_budget)

    def deal_to_ranks(members: list[int]) -> list[list[MicroBatch]]:
        line = _Line.from_inputs(members, inputs, share=share_prefixes)
        cuts = [_cut(line, stretch, token_budget) for stretch in _deal(line, dp_size)]
        shards = [[_fill(data, line, cut, budget=token_budget) for cut in of_rank] for of_rank in cuts]

        # `cost` counts the tokens that a pass runs, without the padding of micro-batches to a multiple.
        cost, read = sum(line.cost(*cut) for of_rank in cuts for cut in of_rank), sum(map(len, line.inputs))
        laid_out = sum(len(micro_batch.tokens) for shard in shards for micro_batch in shard)
        batch.shared_tokens += 0 if line.padded else read - cost
        batch.padding_tokens += cost - read if line.padded else laid_out - cost

        max_count = max(1, *map(len, shards))
        return [shard + [empty_micro_batch() for _ in range(max_count - len(shard))] for shard in shards]

    for part in _minibatches(rows, minibatches, seed):
        learnt = [i for i in part if not skip_zero_advantage or np.any(advantages[i])]
        skipped = sorted({*part} - {*learnt})
        batch.skipped += len(skipped)
        minibatch = MiniBatch(
            shards=deal_to_ranks(learnt),
            draft_shards=deal_to_ranks(skipped) if draft_learns and skipped else [[] for _ in range(dp_size)],
            tokens=sum(trajectories[i].response_length for i in part),
            sequences=len(part),
        )
        batch.minibatches.append(minibatch)
    return batch


def _check_budget(
    inputs: Mapping[int, np.ndarray], trajectories: Sequence[Trajectory], token_budget: int
) -> None:
    """Raise ValueError if the inputs of a trajectory exceed the budget. inputs: by index of trajectories."""
    longest = max(inputs, key=lambda i: len(inputs[i]), default=None)
    if longest is not None and len(inputs[longest]) > token_budget:
        raise ValueError(
            f"trainer.micro_batch_tokens={token_budget} is less than one trajectory of "
            f"{len(inputs[longest])} tokens ({trajectories[longest].trajectory_id}): raise it to at least "
            "rollout.max_context."
        )


def _minibatches(rows: list[int], count: int, seed: int) -> list[list[int]]:
    """Assign rows to `count` minibatches at random; empty ones are left out. One has all rows in order."""
    if count == 1:
        return [rows]
    shuffled = np.random.default_rng(seed).permutation(rows).tolist()
    return [shuffled[i::count] for i in range(count) if shuffled[i::count]]


def trainable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory has a reward and a sampled token (its first token is never predicted)."""
    return trajectory.status is TrajectoryStatus.COMPLETE and bool(trajectory.loss_mask[1:].any())


@dataclass(slots=True, kw_only=True)
class _Line:
    """Trajectories in the order of their layout, and the cost of a stretch [start, stop) of them.

    inputs: for each trajectory, the tokens that the model reads. shared: how many of these tokens the
    previous trajectory also has. fresh: [n + 1] cumulative sums of the tokens that are not shared.
    padded: whether the cost counts padded rows.
    """

    rows: list[int]
    inputs: list[np.ndarray]
    shared: list[int]
    fresh: list[int]
    padded: bool

    @classmethod
    def from_inputs(cls, rows: list[int], inputs: dict[int, np.ndarray], *, share: bool) -> _Line:
        """Sort rows so that neighbours share the most tokens, or, without `share`, need the least padding.

        With `share` this is the lexicographic order of their tokens, else the order of their lengths.
        """
        # Big-endian bytes of token ids sort like the ids, and need no Python number per token.
        key = (lambda i: inputs[i].astype(">u4").tobytes()) if share else (lambda i: -len(inputs[i]))
        order = sorted(sorted(rows), key=key)
        tokens = [inputs[i] for i in order]

        shared = [0] * len(order)
        if share:
            shared[1:] = [_common_prefix(a, b) for a, b in pairwise(tokens)]
        fresh = [0, *accumulate(len(x) - n for x, n in zip(tokens, shared, strict=True))]
        return cls(rows=order, inputs=tokens, shared=shared, fresh=fresh, padded=not share)

    def cost(self, start: int, stop: int) -> int:
        """Return the number of tokens of one forward pass; a longer stretch never costs less."""
        if start == stop:
            return 0
        if self.padded:
            return (stop - start) * len(self.inputs[start])
        return self.fresh[stop] - self.fresh[start] + self.shared[start]


def _deal(line: _Line, ranks: int) -> list[tuple[int, int]]:
    """Return one stretch per rank, such that the most expensive stretch is as cheap as possible."""

    def stretches_within(limit: int) -> list[tuple[int, int]]:
        starts = [0]
        for i in range(1, len(line.rows)):
            if line.cost(starts[-1], i + 1) > limit:
                starts.append(i)
        return list(pairwise([*starts, len(line.rows)]))

    # Find by bisection the lowest cost limit that needs at most `ranks` stretches.
    low, high = max(map(len, line.inputs), default=0), line.cost(0, len(line.rows))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(stretches_within(middle)) <= ranks else (middle + 1, high)

    stretches = stretches_within(low)
    return stretches + [(0, 0)] * (ranks - len(stretches))


def _cut(line: _Line, stretch: tuple[int, int], budget: int) -> list[tuple[int, int]]:
    """Cut a stretch into micro-batches within the budget, with the smallest total cost."""
    start, stop = stretch
    best = {start: (0, start)}  # end -> (cost of all up to it, where its last micro-batch starts)
    for j in range(start + 1, stop + 1):
        choices = []
        for i in range(j - 1, start - 1, -1):
            tokens = line.cost(i, j)
            if tokens > budget:
                break
            choices.append((best[i][0] + tokens + PASS_COST, i))
        best[j] = min(choices)

    # Collect the cuts backwards from the end of the stretch.
    cuts = []
    while stop > start:
        cuts.append((best[stop][1], stop))
        stop = best[stop][1]
    return cuts[::-1]


def _fill(data: TrainingData, line: _Line, cut: tuple[int, int], *, budget: int) -> MicroBatch:
    """Lay out the micro-batch of a cut."""
    start, stop = cut
    size = 0 if line.padded else min(budget, -(-line.cost(start, stop) // MULTIPLE) * MULTIPLE)
    rows, inputs, shared = (x[start:stop] for x in (line.rows, line.inputs, line.shared))
    return lay_out(data, rows, inputs=inputs, shared=shared, size=size)


def _inputs(trajectory: Trajectory) -> np.ndarray:
    """Return the tokens that a forward pass reads: all tokens before the last sampled one."""
    return trajectory.token_ids[: np.flatnonzero(trajectory.loss_mask)[-1]]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
