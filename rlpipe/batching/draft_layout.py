"""A micro-batch laid out for the draft: anchors that siblings share are run once, turns are scored in rows.

Owns the layout; runs nothing. numpy only.

At depth k the anchor at t reads token t + k, so siblings share an anchor only if they agree on K tokens
more: a branch of the draft begins K tokens before that of the backbone, and contexts are cut likewise.

    backbone    p p p p a a a | b b         K = 2: the anchors of the last two p's read a's or b's
    draft       p p p p a a a | p p b b     the second branch starts from the hidden states of those p's

The hidden states are those of the backbone's own pass, gathered. A loss row is a turn: the token before it,
which is the anchor of its first verify step, and its tokens. So prompts and tool output cost no head.
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


def draft_batch(micro: MicroBatch, depths: int, multiple: int = 1) -> DraftBatch | None:
    """The draft's layout of a micro-batch; None when no turn has a drafted token (two tokens or more).

    multiple: fill the anchors up to a multiple of it, with a branch that nobody attends to.
    """
    starts = np.cumsum([0, *(branch.length for branch in micro.branches)])
    ends = np.cumsum(micro.mask.sum(1).astype(np.int64))
    branches: list[Branch] = []
    places, positions, following, turns = [], [], [], []
    path: Path = []  # the trajectory at hand, as pieces of branches
    before = cells = np.zeros(0, dtype=np.int64)  # where its tokens lie in the micro-batch and among anchors
    used = 0
    for row, end in enumerate(ends):
        sampled = micro.indices[row, micro.mask[row] > 0]
        if not len(sampled):
            continue
        own = tokens_up_to(micro.branches, starts, micro.sources[end - 1])
        tokens = np.append(micro.tokens[own], micro.targets[end - 1])
        same = _common_anchors(before, own, depths)
        fresh = len(own) - same
        path, before = first_tokens(path, same), own
        cells = np.concatenate([cells[:same], np.arange(used, used + fresh)])
        if fresh:
            branches.append(Branch(length=fresh, context=path))
            path = [*path, (len(branches) - 1, fresh)]
        places.append(own[same:])
        positions.append(np.arange(same, len(own)))
        following.append(_ahead(tokens, depths)[:, same:-1])
        used += fresh
        for turn in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1):
            if len(turn) > 1:
                span = slice(turn[0] - 1, turn[-1] + 1)
                inside = slice(turn[0] - 1, turn[-1])
                turns.append((row, tokens[span], cells[inside], own[inside]))
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
    """Indices of all tokens of the trajectory that ends with the one at `last`; starts: of the branches."""
    branch = int(np.searchsorted(starts, last, side="right")) - 1
    pieces = [*branches[branch].context, (branch, last - starts[branch] + 1)]
    return np.concatenate([np.arange(starts[b], starts[b] + count) for b, count in pieces])


def _common_anchors(before: np.ndarray, own: np.ndarray, depths: int) -> int:
    """How many anchors of the trajectory before serve a trajectory, too."""
    n = min(len(before), len(own))
    different = np.flatnonzero(before[:n] != own[:n])
    same = int(different[0]) if len(different) else n
    return same if same == len(own) else max(0, same - depths)


def _ahead(tokens: np.ndarray, depths: int) -> np.ndarray:
    """[depths, T] the token k further on, 0 past the end."""
    padded = np.append(tokens, np.zeros(depths, dtype=tokens.dtype))
    return np.lib.stride_tricks.sliding_window_view(padded, len(tokens))[1 : depths + 1]


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    cells = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(cells, rows, strict=True):
        line[: len(row)] = row
    return cells
