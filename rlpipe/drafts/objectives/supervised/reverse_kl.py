"""KL(q || p): Bebop Eq. 17."""

from rlpipe.drafts.objectives.supervised import Supervised

OBJECTIVE = Supervised(by_depth=lambda rows: rows.reverse_kl, needs_target=True)
