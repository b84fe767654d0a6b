"""Objectives that train a draft, and their inputs: row statistics, per-depth sums, alignment."""

from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.drafts.loss.alignment import DepthTargets, depth_targets
from rlpipe.drafts.loss.api import mtp_loss
from rlpipe.drafts.loss.rows import Backend
from rlpipe.drafts.loss.stats import MtpStats

__all__ = [
    "AnchorWeighting",
    "Backend",
    "DepthTargets",
    "DraftObjective",
    "MtpStats",
    "depth_targets",
    "mtp_loss",
]
