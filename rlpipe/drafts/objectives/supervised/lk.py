"""KL where the overlap is small and TV's gradient vanishes, TV where it is large, row by row.

lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-3 alpha), alpha detached. Source: Samarin et al., "LK
losses" (arXiv 2602.23881), the hybrid with decay 3; per row as vllm-project/speculators #673.
"""

from torch import Tensor

from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.objectives.supervised import Supervised

DECAY = 3.0


def loss(rows: Rows) -> Tensor:
    """[N, K] of each drafted token."""
    share = (-DECAY * rows.alpha.detach()).exp()
    return share * rows.kl + (1 - share) * (1 - rows.alpha)


OBJECTIVE = Supervised(by_depth=loss, needs_target=True)
