"""Objectives that train a draft, with what they need: row statistics, per-depth sums, alignment."""

from rlpipe.config.mtp_loss import AnchorWeighting, MtpObjective
from rlpipe.drafts.loss.alignment import DepthTargets, depth_targets
from rlpipe.drafts.loss.api import mtp_loss
from rlpipe.drafts.loss.rows import Backend
from rlpipe.drafts.loss.stats import MtpStats

__all__ = [
    "AnchorWeighting",
    "Backend",
    "DepthTargets",
    "MtpObjective",
    "MtpStats",
    "depth_targets",
    "mtp_loss",
]
