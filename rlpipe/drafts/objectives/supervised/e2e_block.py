"""Rejected share under block verification: E[tau] = sum_j min(1, min_{k <= j} Q(x^k) / P(x^k)).

For tokens of the target. P, Q: joint probabilities of the first k tokens. Block verification (arXiv
2403.10444) keeps x^j with Q(x^j) min_k P(x^j | x^k) / Q(x^j | x^k) = P(x^j) min_k Q(x^k) / P(x^k), k = 0..j.
"""

from torch import Tensor

from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.objectives.supervised import Supervised


def accepted(rows: Rows, mask: Tensor) -> Tensor:
    """[N] expected accepted drafts."""
    log_ratio = (rows.draft_logprob - rows.target_logprob).cumsum(1)
    return (mask * log_ratio.cummin(1).values.clamp(max=0).exp()).sum(1)


OBJECTIVE = Supervised(by_chain=accepted, needs_tokens=True)
