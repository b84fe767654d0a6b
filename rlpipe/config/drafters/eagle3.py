"""An EAGLE-3 draft in a directory of its own; its trainer reads features of a copy of the target.

Settings, shape and files: `rlpipe.config.eagle3`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.config.drafters import DrafterKind, HfConfig
from rlpipe.config.eagle3 import Eagle3Shape, read_shape
from rlpipe.config.paths import resolve
from rlpipe.config.trainer import LrSchedule

if TYPE_CHECKING:
    from rlpipe.config.run import Config


def check_served(config: Config, served: HfConfig) -> None:
    """Refuse a directory without a draft for what is served. Raises ValueError."""
    read_shape(resolve(config.spec.draft_path), served)


def check_trained(config: Config, target: HfConfig) -> None:
    """What training an EAGLE-3 draft needs; target: its `config.json`. Raises ValueError."""
    if config.eagle3.start:
        read_shape(resolve(config.eagle3.start), target, "eagle3.start")
    else:
        Eagle3Shape.for_target(target, config.eagle3.layers, config.eagle3.draft_vocab)


def check_cotrained(config: Config) -> None:
    """What training an EAGLE-3 draft beside the policy needs. Raises ValueError."""
    if config.decoupled.active:
        raise ValueError(
            f"spec.drafter=eagle3 with mtp.train=online learns from the policy, and decoupled.path="
            f"{config.decoupled.path!r} generates in its place: set mtp.train=off."
        )
    if config.mtp.lr_schedule is not LrSchedule.CONSTANT:
        raise ValueError(
            f"mtp.lr_schedule={config.mtp.lr_schedule}: an EAGLE-3 draft is trained at a constant learning "
            "rate after mtp.warmup_steps. Set mtp.lr_schedule=constant."
        )
    if config.injection.weight_noise:
        raise ValueError(
            f"injection.weight_noise={config.injection.weight_noise} would disturb a co-trained EAGLE-3 "
            "draft, its vocabulary included: set it to 0, or mtp.train=off."
        )


DRAFTER = DrafterKind(
    title="EAGLE-3 draft",
    draft="rlpipe.rollout.embedded.eagle3:Eagle3Draft",
    trainer="rlpipe.actors.drafts:make_eagle3",
    sglang="EAGLE3",
    check_served=check_served,
    check_trained=check_trained,
    check_cotrained=check_cotrained,
)
