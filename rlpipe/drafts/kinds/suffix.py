"""Drafts without a model, by lookup in the text.

Needs no pass and no training; pays off where text repeats itself, as edits of a file do.
"""

from __future__ import annotations

from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.spec.suffix import continue_suffix

DRAFTER = DrafterFunctions(guess=lambda tokens, count, spec: continue_suffix(tokens, spec.suffix, count))
