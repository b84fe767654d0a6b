"""An EAGLE-3 draft in a separate directory; its trainer reads features of a copy of the target.

Settings, shape and files: `rlpipe.config.eagle3`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlpipe.config.drafters import HfConfig
from rlpipe.config.eagle3 import Eagle3Shape, read_shape
from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.config.trainer import LrSchedule
from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.models import read_architecture

if TYPE_CHECKING:
    from rlpipe.config.run import Config
    from rlpipe.drafts.standalone_trainer import DraftTrainer
    from rlpipe.types import Trajectory


def make_trainer(
    config: Config,
    start: str,
    trajectories: Sequence[Trajectory] = (),
    *,
    train_alongside: Callable[..., DraftTrainer],
) -> DraftTrainer:
    """Make the trainer of the draft in `start` or, if that is empty, in `eagle3.start`, or of a new draft.

    trajectories: if a new draft has a reduced vocabulary, it is chosen from their sampled tokens.
    train_alongside: builds the trainer around the target (`actors.trainers.train_alongside`). Raises
    ValueError for a target the engine cannot run, or settings that do not fit it.
    """
    from rlpipe.drafts.eagle3_model import Eagle3, new_draft
    from rlpipe.drafts.windows.eagle3 import draft_cost
    from rlpipe.models.checkpoint import read_config, read_weights

    path = resolve_model(config.model.path)
    target, weights = read_config(path), read_weights(path)
    setting = "spec.draft_path" if start else "eagle3.start"
    if start := start or config.eagle3.start:
        draft = Eagle3.load(resolve(start), target, setting)
    else:
        draft = new_draft(config, target, weights, trajectories=trajectories)
    return train_alongside(config, draft, target, weights=weights, draft_cost=draft_cost(draft, weights))


def check_served(config: Config, served: HfConfig) -> None:
    """Refuse a directory without a draft for the served model. Raises ValueError."""
    _check_rotary(served)
    read_shape(resolve(config.spec.draft_path), served)


def _check_rotary(target: HfConfig) -> None:
    arch = read_architecture(target)
    if arch.rotary_dim != arch.head_dim:
        raise ValueError(
            f"spec.drafter=eagle3 rotates full heads, and a model of type {arch.family!r} rotates "
            f"{arch.rotary_dim} of {arch.head_dim} numbers: draft with its MTP layer (spec.drafter=mtp) or "
            "spec.drafter=suffix."
        )


def check_sglang(spec: SpecConfig, target: HfConfig, sglang: SglangConfig) -> None:
    """Refuse a draft that SGLang 0.5.23 would not load, or would compute differently from its training.

    Raises ValueError with the setting, its value and a hint.
    """
    shape = read_shape(resolve(spec.draft_path), target)
    setting = f"spec.draft_path={spec.draft_path!r}"
    if shape.reduced and spec.mode in (SpecMode.REJECTION, SpecMode.BLOCK) and not sglang.plugin:
        raise ValueError(
            f"spec.mode={spec.mode} and rollout.sglang.plugin=false: {setting} knows {shape.draft_vocab} of "
            f"{shape.vocab} tokens, and SGLang samples drafts over the full vocabulary only. Set "
            "rollout.sglang.plugin=true, or use spec.mode=target_only (or greedy), a draft trained with "
            "eagle3.draft_vocab=0, or rollout=embedded."
        )
    depth, layers = int(target["num_hidden_layers"]), list(shape.layers)
    # SGLang's target returns the inputs of the next layers, in ascending order; its draft omits fc if the
    # input of fc is no wider than the draft's state (models/qwen2.py:462, models/llama_eagle3.py:238).
    if len(layers) < 2 or layers != sorted(layers) or layers[-1] == depth - 1:
        raise ValueError(
            f"{setting} reads layers {layers} of the target, and SGLang fuses two or more in ascending order "
            f"up to {depth - 2}. Train a draft on such eagle3.layers, or use rollout=embedded."
        )


def check_trained(config: Config, target: HfConfig) -> None:
    """Refuse targets and settings that do not fit an EAGLE-3 draft. Raises ValueError."""
    _check_rotary(target)
    if config.eagle3.start:
        read_shape(resolve(config.eagle3.start), target, "eagle3.start")
    else:
        Eagle3Shape.for_target(target, config.eagle3.layers, config.eagle3.draft_vocab)


def check_cotrained(config: Config) -> None:
    """Refuse settings under which an EAGLE-3 draft cannot be trained with the policy. Raises ValueError."""
    if config.decoupled.active:
        raise ValueError(
            f"spec.drafter=eagle3 with draft.train=online learns from the policy, and decoupled.path="
            f"{config.decoupled.path!r} generates instead: set draft.train=off."
        )
    if config.draft.lr_schedule is not LrSchedule.CONSTANT:
        raise ValueError(
            f"draft.lr_schedule={config.draft.lr_schedule}: an EAGLE-3 draft is trained at a constant "
            "learning rate after draft.warmup_steps. Set draft.lr_schedule=constant."
        )
    if config.injection.weight_noise:
        raise ValueError(
            f"injection.weight_noise={config.injection.weight_noise} would disturb a co-trained EAGLE-3 "
            "draft, its vocabulary included: set it to 0, or draft.train=off."
        )


DRAFTER = DrafterFunctions(
    make_trainer=make_trainer,
    check_served=check_served,
    check_sglang=check_sglang,
    check_trained=check_trained,
    check_cotrained=check_cotrained,
)
