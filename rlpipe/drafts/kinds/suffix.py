"""Drafts without a model, by lookup in the text.

It needs no forward pass and no training. It pays off where text repeats itself, as in edits of a file.
"""

from __future__ import annotations

from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.spec.suffix import continue_suffix

DRAFTER = DrafterFunctions(guess=lambda tokens, count, spec: continue_suffix(tokens, spec.suffix, count))
