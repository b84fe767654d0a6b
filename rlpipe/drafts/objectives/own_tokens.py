"""KL from the target to the draft along windows that the draft writes itself: `own_kl`.

Under teacher forcing depth k reads tokens of the text, as in EAGLE-3's published training-time test. Here
depth k reads the k - 1 tokens that the draft sampled, and the target predicts the token after them (this is
the training-time test of the notes, and DAgger):

    L = E_{d ~ q} sum_k KL(p(. | d_<k) || q(. | d_<k)),     d a sample: no gradient through its distribution

As for all windows, the cost is a pass of the target over the drafts. Depth k counts even if the drafts before
it would be rejected; in `objectives.exact_window` it counts only if they are accepted.
"""

from __future__ import annotations

from torch import Tensor

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.windows.rollout import Rollout, kl_sum
from rlpipe.drafts.windows.totals import PpowTotals


def windows_loss(rollout: Rollout, hard: float, config: PpowConfig) -> tuple[Tensor, PpowTotals]:
    """Compute the sum over drafts of KL(p || q), a scalar, and totals.

    hard: the share of windows sampled by score. Only the settings for windows and curriculum are used.
    """
    log_q, log_p = rollout.logprobs, rollout.target_logprobs[:, :, :-1]
    total = (log_p.exp() * (log_p - log_q)).sum()
    return total, PpowTotals.from_rollout(rollout, hard, loss=total, kl=kl_sum(log_q, log_p))
