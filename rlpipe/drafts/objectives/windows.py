"""Objectives on windows that the draft generates and the target verifies: a file each and a row of `LOSSES`.

Sampling, drafting and verification of windows are `rlpipe.drafts.windows`, the same for every objective and
drafter; their settings are the section `ppow`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives import ppow
from rlpipe.drafts.windows.rollout import Rollout
from rlpipe.drafts.windows.totals import PpowTotals

# (windows, share of them sampled by score, settings) -> sum over drafts of the loss, a scalar, and totals.
WindowsLoss = Callable[[Rollout, float, PpowConfig], tuple[Tensor, PpowTotals]]

LOSSES: dict[DraftObjective, WindowsLoss] = {
    DraftObjective.PPOW: ppow.windows_loss,
}
