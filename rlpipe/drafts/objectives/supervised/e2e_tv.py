"""Rejected share of a chain with overlaps multiplied: E[tau] = sum_j alpha_1 ... alpha_j (Bebop Eq. 12, 13).

Exact if the chain's tokens come from the draft.
"""

from rlpipe.drafts.objectives.supervised import Supervised
from rlpipe.drafts.visit import expected_accepted

OBJECTIVE = Supervised(by_chain=lambda rows, mask: expected_accepted(rows.alpha, rows.alpha, mask))
