"""Objectives on windows of a draft's own making: each file holds `OBJECTIVE`, a `WindowsLoss`.

Who draws, drafts and judges windows is `rlpipe.drafts.ppow`, the same for every objective and drafter; their
settings are the section `ppow`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

from rlpipe.config.mtp_loss import MtpObjective
from rlpipe.config.ppow import PpowConfig

if TYPE_CHECKING:
    from rlpipe.drafts.ppow.step import Judged
    from rlpipe.drafts.ppow.totals import PpowTotals

# log_q [W, G, K, V] with a graph, tokens [W, G, K], the verdict, scores [W], share drawn by them, settings
# -> sum over drafts of the loss, a scalar, and totals.
WindowsLoss = Callable[[Tensor, Tensor, "Judged", Tensor, float, PpowConfig], tuple[Tensor, "PpowTotals"]]


def windows_loss(kind: MtpObjective) -> WindowsLoss:
    """The loss of a name."""
    return import_module(f"{__name__}.{kind}").OBJECTIVE
