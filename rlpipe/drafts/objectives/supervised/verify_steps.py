"""Expected verify steps of all sequences per token they emit, exact for tokens of the target."""

from torch import Tensor

from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.objectives.supervised import Supervised
from rlpipe.drafts.visit import by_sequence, expected_verify_steps


def steps(rows: Rows, mask: Tensor, turn_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Expected verify steps, and emitted tokens; scalars."""
    accept, mask = by_sequence(rows, mask, turn_starts)
    steps = expected_verify_steps(accept, mask, turn_starts).sum()
    emitted = (mask[..., 0] & (turn_starts.cumsum(1) > 0)).sum()
    return steps.to(accept.dtype), emitted.to(accept.dtype)


OBJECTIVE = Supervised(by_sequence=steps, needs_tokens=True)
