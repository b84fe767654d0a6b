"""Objectives that train a draft, with what they need: row statistics, per-depth sums, alignment."""

from rlpipe.config.mtp_loss import AnchorWeighting, MtpLossKind
from rlpipe.mtp.loss.alignment import DepthTargets, depth_targets, stack_depths
from rlpipe.mtp.loss.api import mtp_loss
from rlpipe.mtp.loss.rows import Backend
from rlpipe.mtp.loss.stats import MtpStats

__all__ = [
    "AnchorWeighting",
    "Backend",
    "DepthTargets",
    "MtpLossKind",
    "MtpStats",
    "depth_targets",
    "mtp_loss",
    "stack_depths",
]
