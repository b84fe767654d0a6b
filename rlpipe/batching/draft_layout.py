"""The layout of a micro-batch for the draft: anchors that siblings share run once, turns are scored in rows.

Owns the layout; runs nothing. numpy only.

At depth k the anchor at t reads token t + k, so siblings share an anchor only if they agree on K further
tokens: a branch of the draft begins K tokens before that of the backbone; contexts are cut in the same way.

    backbone    p p p p a a a | b b         K = 2: the anchors of the last two p's read a's or b's
    draft       p p p p a a a | p p b b     the second branch starts from the hidden states of those p's

The hidden states are gathered from the backbone's own pass. A loss row is a turn: the token before it, which
is the anchor of its first verify step, and its tokens. So prompts and tool output cost no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.batching.micro_batch import Branch, MicroBatch, Path, first_tokens


@dataclass(slots=True, kw_only=True)
class DraftBatch:
    """M anchors the draft runs over, and R turns of at most L tokens it is scored on.

    places: [M] index of each anchor in the micro-batch's tokens. positions: [M] in its trajectory.
    following: [K, M] tokens read at depths 1..K, 0 past the end. branches: cut M without a gap.
    owners: [R] the micro-batch's row that each turn belongs to.
    tokens: [R, L] the token before a turn, then the turn, padded. sampled: [R, L] bool, the turn's.
    anchors: [R, L] index into M of each token, backbone: [R, L] its index in the micro-batch's tokens; 0 for
        the last token of a turn, from which nothing is drafted, and for padding.
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
    """Lay out a micro-batch for the draft; None when no turn has a drafted token (two tokens or more).

    Args:
        micro_batch: as the backbone runs it.
        depths: K, tokens that the draft reads after an anchor.
        multiple: the number of anchors is padded to a multiple of it, with a branch that no token attends to.
    """
    starts = np.cumsum([0, *(branch.length for branch in micro_batch.branches)])
    ends = np.cumsum(micro_batch.mask.sum(1).astype(np.int64))
    branches: list[Branch] = []
    places, positions, following, turns = [], [], [], []
    path: Path = []  # the trajectory at hand, as spans of branches
    # Indices of its tokens: those of the previous trajectory in the micro-batch, and among the anchors.
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

        # Anchors that an earlier trajectory has are read there; the others become a branch.
        path, previous = first_tokens(path, shared), token_ids
        anchor_ids = np.concatenate([anchor_ids[:shared], np.arange(used, used + fresh)])
        if fresh:
            branches.append(Branch(length=fresh, context=path))
            path = [*path, (len(branches) - 1, fresh)]
        places.append(token_ids[shared:])
        positions.append(np.arange(shared, len(token_ids)))
        following.append(_ahead(tokens, depths)[:, shared:-1])
        used += fresh

        # A gap between sampled tokens is tool output, which ends a turn. A turn of one token drafts nothing.
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

    Both are indices into the micro-batch's tokens.
    """
    n = min(len(previous), len(token_ids))
    different = np.flatnonzero(previous[:n] != token_ids[:n])
    same = int(different[0]) if len(different) else n
    # An anchor reads `depths` tokens ahead, so the last ones before a difference read different tokens.
    return same if same == len(token_ids) else max(0, same - depths)


def _ahead(tokens: np.ndarray, depths: int) -> np.ndarray:
    """Return [depths, T]: the token k + 1 further on, 0 past the end."""
    padded = np.append(tokens, np.zeros(depths, dtype=tokens.dtype))
    return np.lib.stride_tricks.sliding_window_view(padded, len(tokens))[1 : depths + 1]


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return rows as [n, length] int64, padded with 0 at the end."""
    padded = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
