"""The trainer's input: flat micro-batches in which siblings share their common prefixes.

Owns the format of a micro-batch; `rlpipe.batching.layout` fills it. numpy only; knows no model.

A micro-batch is one flat list of tokens. It has one `Branch` for each trajectory: the tokens that the
trajectory does not share with an earlier one. The shared tokens are the context of the branch, and are read
from earlier branches. So the prompt of eight siblings is run forward and backward only once, and there is no
padding.

    tokens      p p p p a a a | b b | a b b          "|" separates branches
    positions   0 1 2 3 4 5 6 | 4 5 | 5 6 7          token 5 of the third trajectory follows p p p p a
    contexts    -             | 4 of branch 0 | 5 of branch 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Path = list[tuple[int, int]]  # spans (branch, count): the first `count` tokens of each branch, concatenated


@dataclass(slots=True, kw_only=True)
class Branch:
    """Consecutive tokens of one trajectory, and the tokens before them.

    length: number of tokens, at least 1. context: spans of earlier branches in order. Their concatenated
    tokens are the trajectory up to this branch.
    """

    length: int
    context: Path

    @property
    def shared(self) -> int:
        """Number of tokens in the context."""
        return sum(count for _, count in self.context)


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The most likely tokens at the positions of P sampled tokens.

    ids: [P, K] int64, -1 is padding. logprobs: [P, K] float32 under the rollout, -inf for padding.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One forward pass over N tokens that predicts P sampled tokens of B trajectories.

    rows: [B] index of each trajectory among the packed ones (-1: the only row of an empty micro-batch).
        Segments of a trajectory are rows with the same index.
    tokens: [N] ids that the model reads. positions: [N] position of each token in its trajectory.
    branches: consecutive branches that cover the N tokens.
    sources: [P] index (in tokens) of the position that predicts each sampled token; positions that siblings
        share occur several times. targets: [P] the sampled tokens.
    mask: [B, R] 1 for each sampled token, from the left in each row; R is the largest number of sampled
        tokens in a row. In row-major order the ones are the P predictions.
    indices: [B, R] index of the sampled token in its trajectory.
    rollout_logprobs, advantages: [B, R] logprob and advantage of the sampled token, 0 where mask is 0.
    columns: name -> further numbers [P] of the predictions, if the correction needs them.
    candidates: candidate tokens of the predictions, if the correction needs them.
    routes: [N, layers with experts, experts per token], the experts that read each token in the rollout, as
        in `types.GenerateResult`. For shared tokens, the routes of the first trajectory are used.
    """

    rows: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    branches: list[Branch]
    sources: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    indices: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    candidates: Candidates | None = None
    routes: np.ndarray | None = None

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """Return branches as rows padded on the right, for attention kernels that support only rows.

        Returns:
            Tokens [branches, S], and `sources` [P] as indices into their flat view.

        Raises:
            ValueError: branches share tokens.
        """
        if any(branch.context for branch in self.branches):
            raise ValueError(
                "this micro-batch shares prefixes, which the trainer's layers cannot read: "
                "pack with share_prefixes=trainer.shares_prefixes."
            )
        rows, flat_indices = as_rows(self.branches, self.tokens)
        return rows, flat_indices[self.sources]


def first_tokens(path: Path, tokens: int) -> Path:
    """Return the spans of the first `tokens` tokens of a path."""
    spans = []
    for branch, count in path:
        if tokens <= 0:
            break
        spans.append((branch, min(count, tokens)))
        tokens -= count
    return spans


def as_rows(branches: Sequence[Branch], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return branches as rows padded on the right with 0.

    Args:
        branches: branches with N tokens in total.
        values: [N], one value per flat token.

    Returns:
        Rows [branches, S], and the index [N] of each flat token in the flat view of the rows.
    """
    lengths = np.array([branch.length for branch in branches])
    filled = np.arange(lengths.max()) < lengths[:, None]
    rows = np.zeros(filled.shape, dtype=values.dtype)
    rows[filled] = values
    return rows, np.flatnonzero(filled)


@dataclass(slots=True, kw_only=True)
class MiniBatch:
    """The data of one optimizer step.

    shards: micro-batches by data parallel rank.
    draft_shards: micro-batches of trajectories that were left out for their zero advantage; only the draft
        learns from them (none without `draft_learns` of `pack`).
    tokens, sequences: numbers of trainable tokens and sequences over all ranks, including trajectories that
        were left out; they normalise the loss.
    """

    shards: list[list[MicroBatch]]
    draft_shards: list[list[MicroBatch]]
    tokens: int
    sequences: int


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """A batch ready for the trainer; every rank receives all of it and reads its shard.

    lengths: number of tokens of every trajectory, packed or not.
    temperature: the rollout's temperature; logprobs are computed from softmax(logits / temperature).
    skipped: number of trajectories left out for their zero advantage.
    shared_tokens: number of tokens that are not run because an earlier trajectory has them.
    padding_tokens: number of tokens that pad rows, or pad micro-batches to a multiple.
    """

    minibatches: list[MiniBatch]
    lengths: list[int]
    temperature: float = 1.0
    skipped: int = 0
    shared_tokens: int = 0
    padding_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of trainable tokens."""
        return sum(m.tokens for m in self.minibatches)
