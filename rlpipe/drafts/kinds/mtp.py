"""The checkpoint's MTP layer; it is trained inside the policy's trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.drafters import HfConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.models.checkpoint import require_mtp

if TYPE_CHECKING:
    from rlpipe.config.run import Config


def check_served(config: Config, served: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer, and a draft vocabulary made for another model."""
    require_mtp(served, config.rollout_model, config.spec.mode)
    read_draft_vocab(config.spec, config.rollout_model, int(served["vocab_size"]))


def check_trained(config: Config, target: HfConfig) -> None:
    """Refuse a checkpoint without an MTP layer, and a draft vocabulary made for another model."""
    require_mtp(target, config.model.path, "mtp_adapt")
    read_draft_vocab(config.spec, config.model.path, int(target["vocab_size"]))


def check_sglang(spec: SpecConfig, target: HfConfig, sglang: SglangConfig) -> None:
    """Refuse a draft vocabulary if rlpipe's plugin is off or if there are several devices."""
    if spec.draft_vocab and (sglang.tp > 1 or not sglang.plugin):
        raise ValueError(
            f"spec.draft_vocab={spec.draft_vocab!r} with rollout.sglang.tp={sglang.tp}, "
            f"rollout.sglang.plugin={sglang.plugin}: SGLang copies the rows of the head once, at its start, "
            "and rlpipe's plugin at each update, on one device. Set tp=1 and plugin=true, "
            "spec.draft_vocab='', or rollout=embedded."
        )


DRAFTER = DrafterFunctions(check_served=check_served, check_sglang=check_sglang, check_trained=check_trained)
