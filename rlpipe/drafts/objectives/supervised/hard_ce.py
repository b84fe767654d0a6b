"""Cross-entropy against the realised token: -log q(x)."""

from rlpipe.drafts.objectives.supervised import Supervised

OBJECTIVE = Supervised(by_depth=lambda rows: -rows.draft_logprob, needs_tokens=True)
