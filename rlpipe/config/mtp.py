"""How the draft (MTP) layer is trained. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.choice import Choice


class MtpTrain(Choice):
    """Whether the MTP layer learns."""

    FROZEN = "frozen"  # never updated; the embedding and head it shares with the target still move


@dataclass(slots=True, kw_only=True)
class MtpConfig:
    """The MTP layer's own parameter group.

    train: whether it learns. lr, min_lr: peak and final learning rate of its group.
    clip_grad: bound on its own gradient norm, apart from the policy's (0: unbounded).
    """

    train: MtpTrain = MtpTrain.FROZEN
    lr: float = 1e-4
    min_lr: float = 0.0
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"mtp: 0 <= min_lr <= lr is required, got min_lr={self.min_lr}, lr={self.lr}.")
        if self.clip_grad < 0:
            raise ValueError(f"mtp.clip_grad must be >= 0 (0 switches clipping off), got {self.clip_grad}.")
