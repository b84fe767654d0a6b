"""The checkpoint's MTP layer; it is trained inside the policy's trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.config.drafters import DrafterKind, HfConfig, ServedDraft
from rlpipe.models.base import EMBEDDING, HEAD
from rlpipe.models.checkpoint import MTP_PREFIX, require_mtp

if TYPE_CHECKING:
    from rlpipe.config.run import Config


def check_served(config: Config, served: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer."""
    require_mtp(served, config.rollout_model, config.spec.mode)


def check_trained(config: Config, target: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer."""
    require_mtp(target, config.model.path, "mtp_adapt")


DRAFTER = DrafterKind(
    title="MTP draft",
    sglang="NEXTN",
    served=ServedDraft(
        prefix=MTP_PREFIX,
        tables=lambda family, config: (
            (family.draft_place, "", family.draft),
            (f"model.{family.draft_block}.", "", family.layer_parts(config)),
        ),
        shared=(EMBEDDING, HEAD),
    ),
    check_served=check_served,
    check_trained=check_trained,
)
