"""KL from the target to the draft along windows that the draft writes itself: `own_kl`.

Teacher forcing lets depth k read the given tokens, as EAGLE-3's published training-time test does. Here depth
k reads the k - 1 tokens that the draft sampled, and the target is asked what follows those (the notes'
training-time test, DAgger):

    L = E_{d ~ q} sum_k KL(p(. | d_<k) || q(. | d_<k)),     d a sample: no gradient through its distribution

It costs what windows cost, a pass of the target over the drafts. Depth k counts whether or not the drafts
before it would be accepted; `objectives.exact_window` counts only those.
"""

from __future__ import annotations

from torch import Tensor

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.windows.rollout import Rollout, kl_sum
from rlpipe.drafts.windows.totals import PpowTotals


def windows_loss(rollout: Rollout, hard: float, config: PpowConfig) -> tuple[Tensor, PpowTotals]:
    """Compute the sum over drafts of KL(p || q), a scalar, and totals.

    hard: the share of windows sampled by score. Of the settings only those of windows and curriculum count.
    """
    log_q, log_p = rollout.logprobs, rollout.target_logprobs[:, :, :-1]
    total = (log_p.exp() * (log_p - log_q)).sum()
    return total, PpowTotals.from_rollout(rollout, hard, loss=total, kl=kl_sum(log_q, log_p))
