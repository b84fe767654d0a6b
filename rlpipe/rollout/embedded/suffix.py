"""Drafts without a model: what followed the last time the text ended like this (prompt lookup).

Owns the lookup. A draft is certain given the past, so q is one at it and verification is target-only's
(or greedy's), lossless as ever. Costs no pass and no training; pays where text repeats itself, as edits
of a file do.
"""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.config.spec import SpecMode
from rlpipe.rollout.embedded.drafting import ChainDrafting, Drafted, Part
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable


def continue_suffix(tokens: np.ndarray, longest: int, count: int) -> np.ndarray:
    """`count` tokens guessed to follow `tokens` [T >= 1]: those after the last occurrence of its suffix.

    The longest suffix of at most `longest` tokens that occurs before counts; a guess that reaches the end of
    the text goes on in its own tokens, so that a period is kept up. Without an occurrence the last token is
    repeated.

    >>> continue_suffix(np.array([5, 6, 7, 8, 5, 6]), longest=3, count=3).tolist()
    [7, 8, 5]
    >>> continue_suffix(np.array([1, 2, 1, 2, 1]), longest=3, count=4).tolist()
    [2, 1, 2, 1]
    """
    length = len(tokens)
    source = length - 1
    for size in range(min(longest, length - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        found = np.flatnonzero((windows == tokens[length - size :]).all(1))
        if len(found):
            source = int(found[-1]) + size
            break
    period = length - source
    return tokens[source + np.arange(count) % period]


class SuffixDrafting(ChainDrafting):
    """One path of looked-up drafts; see `Drafting`."""

    def __init__(self, model: Model, table: RowTable, mode: SpecMode, longest: int) -> None:
        super().__init__(model, table, mode if mode is SpecMode.GREEDY else SpecMode.TARGET_ONLY)
        self._longest = longest

    def draft(self, decoding: int, gamma: int) -> Drafted:
        """Draft gamma tokens for every row; gamma = 0 drafts nothing."""
        table, model = self._table, self._model
        last, pending, uniforms = self._start(decoding, gamma)
        guesses = np.zeros((decoding, gamma), np.int64)
        if gamma:
            for row, total in enumerate(table.total[:decoding]):
                guesses[row] = continue_suffix(table.tokens[row, :total], self._longest, gamma)
        positions = last[:, None] + np.arange(gamma + 1)
        span = model.span(0, self._upload(positions), last + gamma + 1)
        tokens = torch.cat((pending.unsqueeze(1), self._upload(guesses)), 1)
        part = Part(0, span, tokens, torch.zeros_like(pending), positions)
        return Drafted(part, uniforms, None, list(range(gamma)))
