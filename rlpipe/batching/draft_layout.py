"""The layout of a micro-batch for the draft: shared anchors of siblings run once; each turn is a loss row.

Owns the layout; runs no model. numpy only.

At depth k, the anchor at t reads token t + k. So siblings share an anchor only if their next K tokens are
equal: a branch of the draft begins K tokens before the branch of the backbone, and its context is K tokens
shorter.

    backbone    p p p p a a a | b b         K = 2: the anchors of the last two p's read a's or b's
    draft       p p p p a a a | p p b b     the second branch starts from the hidden states of those p's

The hidden states are gathered from the backbone's forward pass. A loss row is one turn: the token before the
turn (the anchor of its first verify step), and the turn's tokens. So prompts and tool output need no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.batching.micro_batch import Branch, MicroBatch, Path, first_tokens


@dataclass(slots=True, kw_only=True)
class DraftBatch:
    """M anchors that the draft reads, and R turns of at most L tokens on which the loss is computed.

    places: [M] index of each anchor in the micro-batch's tokens.
    positions: [M] position of each anchor in its trajectory.
    following: [K, M] tokens read at depths 1..K, 0 past the end. branches: consecutive branches that cover M.
    owners: [R] the micro-batch's row of each turn.
    tokens: [R, L] the token before a turn, then the turn, padded. sampled: [R, L] bool, True for the turn's
        tokens.
    anchors: [R, L] index of each token among the M anchors. backbone: [R, L] index of each token in the
        micro-batch's tokens. Both are 0 for padding and for the last token of a turn, which is no anchor.
    """

    places: np.ndarray
    positions: np.ndarray
    following: np.ndarray
    branches: list[Branch]
    owners: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    anchors: np.ndarray
    backbone: np.ndarray


def draft_batch(micro_batch: MicroBatch, depths: int, multiple: int = 1) -> DraftBatch | None:
    """Lay out a micro-batch for the draft; return None if every turn has fewer than two tokens (no drafts).

    Args:
        micro_batch: the layout for the backbone.
        depths: K, number of tokens that the draft reads after an anchor.
        multiple: the number of anchors is padded to a multiple of this, with a branch that no token reads.
    """
    starts = np.cumsum([0, *(branch.length for branch in micro_batch.branches)])
    ends = np.cumsum(micro_batch.mask.sum(1).astype(np.int64))
    branches: list[Branch] = []
    places, positions, following, turns = [], [], [], []
    path: Path = []  # the current trajectory, as spans of branches
    # Indices of the previous trajectory's tokens, in the micro-batch and among the anchors.
    previous = anchor_ids = np.zeros(0, dtype=np.int64)
    used = 0

    for row, end in enumerate(ends):
        sampled = micro_batch.indices[row, micro_batch.mask[row] > 0]
        if not len(sampled):
            continue

        token_ids = tokens_up_to(micro_batch.branches, starts, micro_batch.sources[end - 1])
        tokens = np.append(micro_batch.tokens[token_ids], micro_batch.targets[end - 1])
        shared = _common_anchors(previous, token_ids, depths)
        fresh = len(token_ids) - shared

        # Anchors of an earlier trajectory are used again; the others become a branch.
        path, previous = first_tokens(path, shared), token_ids
        anchor_ids = np.concatenate([anchor_ids[:shared], np.arange(used, used + fresh)])
        if fresh:
            branches.append(Branch(length=fresh, context=path))
            path = [*path, (len(branches) - 1, fresh)]
        places.append(token_ids[shared:])
        positions.append(np.arange(shared, len(token_ids)))
        following.append(_ahead(tokens, depths)[:, shared:-1])
        used += fresh

        # A gap between sampled tokens is tool output, which ends a turn. A turn of one token has no drafts.
        for turn in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1):
            if len(turn) > 1:
                span = slice(turn[0] - 1, turn[-1] + 1)
                inside = slice(turn[0] - 1, turn[-1])
                turns.append((row, tokens[span], anchor_ids[inside], token_ids[inside]))

    if not turns:
        return None

    if spare := -used % multiple:
        branches.append(Branch(length=spare, context=[]))
        places.append(np.zeros(spare, dtype=np.int64))
        positions.append(np.arange(spare))
        following.append(np.zeros((depths, spare), dtype=np.int64))

    owners, tokens, anchors, backbone = zip(*turns, strict=True)
    longest = max(map(len, tokens))
    lengths = np.array([*map(len, tokens)])[:, None]
    columns = np.arange(longest)

    return DraftBatch(
        places=np.concatenate(places),
        positions=np.concatenate(positions),
        following=np.concatenate(following, axis=1),
        branches=branches,
        owners=np.array(owners),
        tokens=_padded(tokens, longest),
        sampled=(columns > 0) & (columns < lengths),
        anchors=_padded(anchors, longest),
        backbone=_padded(backbone, longest),
    )


def tokens_up_to(branches: list[Branch], starts: np.ndarray, last: int) -> np.ndarray:
    """Return the indices of all tokens of the trajectory that ends with the token at `last`.

    starts: index of the first token of each branch.
    """
    branch = int(np.searchsorted(starts, last, side="right")) - 1
    path = [*branches[branch].context, (branch, last - starts[branch] + 1)]
    first = starts.tolist()
    return np.concatenate([np.arange(first[b], first[b] + count) for b, count in path])


def _common_anchors(previous: np.ndarray, token_ids: np.ndarray, depths: int) -> int:
    """Count the anchors of the previous trajectory that a trajectory shares.

    Both arguments are indices into the micro-batch's tokens.
    """
    n = min(len(previous), len(token_ids))
    different = np.flatnonzero(previous[:n] != token_ids[:n])
    same = int(different[0]) if len(different) else n
    # An anchor reads `depths` tokens ahead, so the last ones before a difference read different tokens.
    return same if same == len(token_ids) else max(0, same - depths)


def _ahead(tokens: np.ndarray, depths: int) -> np.ndarray:
    """Return [depths, T]: row k has, for each token, the token k + 1 positions later, 0 past the end."""
    padded = np.append(tokens, np.zeros(depths, dtype=tokens.dtype))
    return np.lib.stride_tricks.sliding_window_view(padded, len(tokens))[1 : depths + 1]


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return rows as [n, length] int64, padded with 0 at the end."""
    padded = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
