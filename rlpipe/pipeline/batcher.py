"""Trajectories to padded micro-batches, and the totals that make the loss independent of the cut.

Owns the cut: which trajectories take part, how they are dealt to data parallel ranks and minibatches,
and how rows are packed under a token budget. numpy only; knows no model and no loss. Flow: drop what
cannot be trained on, shuffle into minibatches, deal each minibatch to ranks by length (long and short
alternate), sort by length, fill micro-batches until rows * padded length would exceed the budget.

Invariants: every trainable token is in exactly one micro-batch of each pass; every rank of a minibatch
has the same number of micro-batches (a rank short of rows gets empty ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.types import Trajectory, TrajectoryStatus


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right; arrays are [B, S].

    rows: [B] index of each row in the packed trajectories (-1: an empty micro-batch's only row).
    inputs: token ids read. targets: token ids predicted (inputs shifted by one). mask: 1 where the
    target was sampled by the policy. rollout_logprobs, advantages: of the target, 0 where mask is 0.
    """

    rows: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray


@dataclass(slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer step trains on.

    shards: micro-batches by data parallel rank. tokens, sequences: trainable ones over all ranks,
    those of trajectories left out for their zero advantage included; they normalise the loss.
    """

    shards: list[list[MicroBatch]]
    tokens: int
    sequences: int


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """A batch ready for the trainer; every rank gets the whole and reads its shard.

    lengths: tokens of every trajectory given, packed or not. temperature: the rollout's; logprobs are
    those of softmax(logits / temperature). skipped: trajectories left out for their zero advantage.
    padding_tokens: cells of the micro-batches that hold no token.
    """

    minibatches: list[MiniBatch]
    lengths: list[int]
    temperature: float = 1.0
    skipped: int = 0
    padding_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Trainable tokens."""
        return sum(m.tokens for m in self.minibatches)


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray] | None,
    token_budget: int,
    dp_size: int = 1,
    *,
    minibatches: int = 1,
    temperature: float = 1.0,
    skip_zero_advantage: bool = False,
    seed: int = 0,
) -> PackedBatch:
    """Cut trajectories into micro-batches of at most `token_budget` padded tokens.

    advantages: per token, parallel to each trajectory's token_ids (None: all zero, for logprobs only).
    minibatches: optimizer steps a pass makes; trajectories are dealt to them at random from `seed`.
    skip_zero_advantage: leave out trajectories without a non-zero advantage; they count in the totals.
    Left out always: masked trajectories, and those without a sampled token.
    Raises ValueError when one trajectory alone exceeds the budget.
    """
    rows = [i for i, t in enumerate(trajectories) if trainable(t)]
    spans = {i: int(np.flatnonzero(trajectories[i].loss_mask)[-1]) for i in rows}
    too_long = max(rows, key=spans.__getitem__, default=None)
    if too_long is not None and spans[too_long] > token_budget:
        raise ValueError(
            f"trainer.micro_batch_tokens={token_budget} is less than one trajectory of {spans[too_long]} "
            f"tokens ({trajectories[too_long].trajectory_id}): raise it to at least rollout.max_context."
        )
    if advantages is None:
        advantages = [np.zeros(len(t.token_ids), dtype=np.float32) for t in trajectories]
    parts = [rows[:]]
    if minibatches > 1:
        shuffled = np.random.default_rng(seed).permutation(rows).tolist()
        parts = [shuffled[i::minibatches] for i in range(minibatches) if shuffled[i::minibatches]]
    lengths = [len(t.token_ids) for t in trajectories]
    batch = PackedBatch(minibatches=[], lengths=lengths, temperature=temperature)
    for part in parts:
        kept = [i for i in part if not skip_zero_advantage or np.any(advantages[i])]
        batch.skipped += len(part) - len(kept)
        shards = [
            [_micro_batch(chunk, trajectories, advantages, spans) for chunk in chunks]
            for chunks in _deal(kept, spans, token_budget, dp_size)
        ]
        tokens = sum(trajectories[i].response_length for i in part)
        batch.minibatches.append(MiniBatch(shards=shards, tokens=tokens, sequences=len(part)))
        cells = sum(m.mask.size for shard in shards for m in shard if m.rows[0] >= 0)
        batch.padding_tokens += cells - sum(spans[i] for i in kept)
    return batch


def trainable(trajectory: Trajectory) -> bool:
    """Whether a trajectory has a reward and a sampled token (its first token is never predicted)."""
    return trajectory.status is TrajectoryStatus.COMPLETE and any(trajectory.loss_mask[1:])


def _deal(rows: list[int], spans: dict[int, int], budget: int, dp_size: int) -> list[list[list[int]]]:
    """Rows of each micro-batch of each rank: longest first, dealt there and back, then cut by budget."""
    order = sorted(rows, key=lambda i: (-spans[i], i))
    ranks: list[list[list[int]]] = []
    for rank in range(dp_size):
        there, back = order[rank :: 2 * dp_size], order[2 * dp_size - 1 - rank :: 2 * dp_size]
        mine = sorted(there + back, key=lambda i: -spans[i])
        chunks: list[list[int]] = []
        for i in mine:  # the first row of a chunk is its longest
            if chunks and (len(chunks[-1]) + 1) * spans[chunks[-1][0]] <= budget:
                chunks[-1].append(i)
            else:
                chunks.append([i])
        ranks.append(chunks)
    most = max(1, *(len(chunks) for chunks in ranks))
    return [chunks + [[] for _ in range(most - len(chunks))] for chunks in ranks]


def _micro_batch(
    rows: list[int],
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    spans: dict[int, int],
) -> MicroBatch:
    """Pad rows; tokens after the last sampled one are cut off, nothing is learnt from them."""
    shape = (max(1, len(rows)), max([1, *(spans[i] for i in rows)]))
    inputs, targets = np.zeros((2, *shape), dtype=np.int64)
    mask, rollout, advantage = np.zeros((3, *shape), dtype=np.float32)
    for b, i in enumerate(rows):
        n, t = spans[i], trajectories[i]
        inputs[b, :n] = t.token_ids[:n]
        targets[b, :n] = t.token_ids[1 : n + 1]
        mask[b, :n] = t.loss_mask[1 : n + 1]
        rollout[b, :n] = t.rollout_logprobs[1 : n + 1]
        advantage[b, :n] = advantages[i][1 : n + 1]
    return MicroBatch(
        rows=np.array(rows or [-1]),
        inputs=inputs,
        targets=targets,
        mask=mask,
        rollout_logprobs=rollout * mask,
        advantages=advantage * mask,
    )
