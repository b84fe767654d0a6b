"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the text's last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def continue_suffix(tokens: np.ndarray, longest: int, count: int) -> np.ndarray:
    """Guess `count` tokens after `tokens` [T >= 1]: what followed the last earlier occurrence of its suffix.

    The suffix is the longest one of at most `longest` tokens that occurs earlier. A guess that reaches the
    end of the text continues with the guessed tokens, so that periodic text repeats. If no suffix occurs
    earlier, the last token is repeated.

    >>> import numpy as np
    >>> continue_suffix(np.array([5, 6, 7, 8, 5, 6]), longest=3, count=3).tolist()
    [7, 8, 5]
    >>> continue_suffix(np.array([1, 2, 1, 2, 1]), longest=3, count=4).tolist()
    [2, 1, 2, 1]
    """
    import numpy as np  # imported here, so that preflight loads without it

    length = len(tokens)
    source = length - 1
    for size in range(min(longest, length - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        occurrences = np.flatnonzero((windows == tokens[length - size :]).all(1))
        if len(occurrences):
            source = int(occurrences[-1]) + size
            break

    period = length - source
    return tokens[source + np.arange(count) % period]
