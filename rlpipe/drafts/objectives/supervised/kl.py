"""KL(p || q), with gradient q - p as soft cross-entropy has it: Bebop's "CE", App. B."""

from rlpipe.drafts.objectives.supervised import Supervised

OBJECTIVE = Supervised(by_depth=lambda rows: rows.kl, needs_target=True)
