"""Rejected share of a chain: E[tau] = sum_j a_1 ... a_{j-1} alpha_j, exact for tokens of the target.

Averaged over x ~ p: E_p[a_1 ... a_{j-1} alpha_j] is the probability that j drafts are accepted, as
p(x) a(x) = min(p, q)(x) is the law of accepted drafts. Source: notes, "End-to-end TV loss".
"""

from torch import Tensor

from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.objectives.supervised import Supervised
from rlpipe.drafts.visit import accept_probabilities, expected_accepted


def accepted(rows: Rows, mask: Tensor) -> Tensor:
    """[N] expected accepted drafts."""
    return expected_accepted(rows.alpha, accept_probabilities(rows.draft_logprob, rows.target_logprob), mask)


OBJECTIVE = Supervised(by_chain=accepted, needs_tokens=True)
