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
    from rlpipe.drafts.ppow.step import Rollout
    from rlpipe.drafts.ppow.totals import PpowTotals

# Windows, the share of them drawn by score, settings -> sum over drafts of the loss, a scalar, and totals.
WindowsLoss = Callable[["Rollout", float, PpowConfig], tuple[Tensor, "PpowTotals"]]


def windows_loss(kind: MtpObjective) -> WindowsLoss:
    """The loss of a name."""
    return import_module(f"{__name__}.{kind}").OBJECTIVE
