"""The checkpoint's MTP layer; it is trained inside the policy's trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.config.drafters import HfConfig
from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.models.checkpoint import require_mtp

if TYPE_CHECKING:
    from rlpipe.config.run import Config


def check_served(config: Config, served: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer."""
    require_mtp(served, config.rollout_model, config.spec.mode)


def check_trained(config: Config, target: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer."""
    require_mtp(target, config.model.path, "mtp_adapt")


DRAFTER = DrafterFunctions(check_served=check_served, check_trained=check_trained)
