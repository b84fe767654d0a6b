"""Rejected mass depth by depth, 1 - alpha: Bebop Eq. 10, 11."""

from rlpipe.drafts.objectives.supervised import Supervised

OBJECTIVE = Supervised(by_depth=lambda rows: 1 - rows.alpha)
