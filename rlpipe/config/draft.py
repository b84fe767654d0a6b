"""Settings of the training of a draft model (MTP layer or EAGLE-3). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.draft_objectives import EXACT_ON_OWN_TOKENS, SUPERVISED, AnchorWeighting, DraftObjective
from rlpipe.config.limits import at_least, learning_rates
from rlpipe.config.trainer import LrSchedule
from rlpipe.models.checkpoint import has_mtp


class DraftTrain(Choice):
    """Whether the draft model is trained during RL: the MTP layer, or the EAGLE-3 draft of spec.drafter."""

    OFF = "off"  # never updated, but the embedding and head that it shares with the target still change
    ONLINE = "online"  # co-trained on every RL batch, from hidden states of the policy's forward pass


@dataclass(slots=True, kw_only=True)
class DraftConfig:
    """Objective and optimizer of the draft model, separate from the policy's."""

    # The value is a DraftTrain, but its type is text, so that errors of `read_train` can suggest a value.
    train: str = DraftTrain.OFF.value
    """Whether the draft is trained during RL (off, online); task=mtp_adapt always trains it."""

    objective: DraftObjective = DraftObjective.E2E_TV
    """Objective of the draft, before and during RL."""

    anchors: AnchorWeighting = AnchorWeighting.UNIFORM
    """See `AnchorWeighting`. Not used by objectives on windows."""

    depths: int = 3
    """Number of draft depths to train; spec.gamma is best. If there are several MTP layers, each is trained
    for one depth, and the last one also for all greater depths."""

    interval: int = 1
    """During RL, train the draft only in every n-th optimizer step; must be 1 in mtp_adapt."""

    lr: float = 1e-4
    """Learning rate of the draft. Its schedule counts updates of the draft."""

    min_lr: float = 0.0
    """Learning rate at the end of a decaying schedule."""

    warmup_steps: int = 0
    """Number of updates of the draft in which the learning rate rises."""

    lr_schedule: LrSchedule = LrSchedule.CONSTANT
    """See `LrSchedule`."""

    clip_grad: float = 1.0
    """Bound on the draft's gradient norm, separate from the policy's; 0: unbounded."""

    def __post_init__(self) -> None:
        self.train = read_train(self.train)
        self.objective = DraftObjective(self.objective)
        self.anchors = AnchorWeighting(self.anchors)
        self.lr_schedule = LrSchedule(self.lr_schedule)

        learning_rates(self, "draft")
        at_least(1, self, "draft", "depths", "interval")
        at_least(0, self, "draft", "warmup_steps")
        at_least(0, self, "draft", "clip_grad", remedy="0 switches clipping off")

    @property
    def online(self) -> bool:
        """Whether the draft is trained during RL."""
        return self.train is DraftTrain.ONLINE

    @property
    def windows(self) -> bool:
        """Whether the draft model learns from windows of tokens that it generates."""
        return self.objective not in SUPERVISED

    @property
    def supervised(self) -> DraftObjective:
        """The objective that the teacher-forced statistics report."""
        return DraftObjective.E2E_TV if self.windows else self.objective

    @property
    def own_tokens_only(self) -> dict[str, str]:
        """The settings that are exact only for tokens that the target sampled, with a hint for each.

        In RL, the policy (with staleness, an earlier version) sampled all tokens that are trained on.
        """
        hints = {}
        if self.objective in EXACT_ON_OWN_TOKENS:
            hints[f"draft.objective={self.objective}"] = "draft.objective=e2e_tv"
        if self.anchors is AnchorWeighting.VISIT and not self.windows:
            hints["draft.anchors=visit"] = "draft.anchors=uniform"
        return hints


def read_train(value: str) -> DraftTrain:
    """Read the setting draft.train. YAML turns a bare `off` into false, so "False" means off too.

    Raises ValueError for values other than off and online; for an earlier name it states the replacement.

    >>> read_train("False") is read_train("off") is DraftTrain.OFF
    True
    """
    value = "off" if str(value) == "False" else str(value)
    if value in list(DraftTrain):
        return DraftTrain(value)

    # Earlier versions had these values.
    remedies = {"frozen": "draft.train=off", "ppow": "draft.train=online draft.objective=ppow"}
    remedy = remedies.get(value, "draft.train=off, or draft.train=online")
    raise ValueError(f"draft.train={value} is not known: set {remedy} (how it learns is draft.objective).")


def check_draft(config: DraftConfig, hf_config: Mapping[str, Any], path: str) -> None:
    """Refuse a checkpoint without an MTP layer, or with one that the objective cannot train.

    hf_config: the checkpoint's `config.json`. Raises ValueError with a hint.
    """
    if not has_mtp(hf_config):
        raise ValueError(
            f"{path!r} has no MTP layer (num_nextn_predict_layers is missing or 0), so there is no draft to "
            "train or score: use a checkpoint with one, or set draft.train=off."
        )

    if config.windows and hf_config.get("linear_num_key_heads"):
        raise ValueError(
            f"draft.objective={config.objective} continues from the keys of a pass, and the gated delta nets "
            f"of {path!r} keep none: set draft.objective=e2e_tv."
        )

    layers = int(hf_config["num_nextn_predict_layers"])
    if layers > 1 and config.windows:
        raise ValueError(
            f"draft.objective={config.objective} drafts with one MTP layer for all depths, but {path!r} has "
            f"{layers}: set draft.objective=e2e_tv."
        )
