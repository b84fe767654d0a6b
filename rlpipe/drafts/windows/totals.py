"""Metrics of a PPOW step, and the sums over windows that they are made from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.metrics.values import Mean, Value

if TYPE_CHECKING:
    from rlpipe.drafts.windows.rollout import Rollout


class Total(IntEnum):
    """The sums over windows."""

    WINDOWS = 0
    DRAFTS = auto()
    LOSS = auto()
    REWARD = auto()
    ACCEPTED = auto()
    REJECTED = auto()  # windows without an accepted draft
    CLOSE = auto()  # rejected windows that earn R_dist
    EVEN = auto()  # windows with the same reward as all siblings: no advantage
    KL = auto()
    CLIPPED = auto()
    SCORE = auto()
    HARD = auto()


@dataclass(slots=True, kw_only=True)
class PpowTotals:
    """Totals of windows. sums: [len(Total)] float64, on the device; add them over micro-batches and ranks."""

    sums: Tensor

    @property
    def weight(self) -> Tensor:
        """Denominator of the loss."""
        return self.sums[Total.DRAFTS]

    @classmethod
    def zeros(cls, device: torch.device) -> PpowTotals:
        """Return the totals of no window."""
        return cls(sums=torch.zeros(len(Total), dtype=torch.float64, device=device))

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, hard: float, *, loss: Tensor, kl: Tensor, clipped: Tensor | int = 0
    ) -> PpowTotals:
        """Sum over the windows of a rollout.

        hard: the share of windows sampled by score. loss, clipped: sums over drafts. kl: the sum of
        KL(draft || target) over drafts, nats.
        """
        verified, windows = rollout.verified, rollout.verified.rewards.numel()

        # Windows whose group has equal rewards have no advantage, so the draft learns nothing from them.
        even = (verified.rewards == verified.rewards[:, :1]).all(1, keepdim=True).expand_as(verified.rewards)

        values = {
            Total.WINDOWS: windows,
            Total.DRAFTS: rollout.tokens.numel(),
            Total.LOSS: loss.detach(),
            Total.REWARD: verified.rewards.sum(),
            Total.ACCEPTED: verified.num_accepted.sum(),
            Total.REJECTED: (verified.num_accepted == 0).sum(),
            Total.CLOSE: verified.close.sum(),
            Total.EVEN: even.sum(),
            Total.KL: kl,
            Total.CLIPPED: clipped,
            Total.SCORE: rollout.windows.scores.sum() * rollout.tokens.shape[1],
            Total.HARD: hard * windows,
        }
        totals = cls.zeros(rollout.tokens.device)
        for name in Total:
            totals.sums[name] = values[name]
        return totals

    def __add__(self, other: PpowTotals) -> PpowTotals:
        return PpowTotals(sums=self.sums + other.sums)

    def all_reduce(self, group: dist.ProcessGroup) -> PpowTotals:
        """Sum over data parallel ranks."""
        sums = self.sums.clone()
        dist.all_reduce(sums, group=group)
        return PpowTotals(sums=sums)

    def metrics(self) -> dict[str, Value]:
        """Return the metrics `ppow/*`; copies from the device once."""
        sums = dict(zip(Total, self.sums.tolist(), strict=True))
        windows, drafts = sums[Total.WINDOWS], sums[Total.DRAFTS]
        return {
            "ppow/loss": Mean(sums[Total.LOSS], drafts),
            "ppow/kl": Mean(sums[Total.KL], drafts),
            "ppow/clip_fraction": Mean(sums[Total.CLIPPED], drafts),
            "ppow/reward": Mean(sums[Total.REWARD], windows),
            "ppow/accepted": Mean(sums[Total.ACCEPTED], windows),
            "ppow/rejected_windows": Mean(sums[Total.REJECTED], windows),
            "ppow/close_windows": Mean(sums[Total.CLOSE], sums[Total.REJECTED]),
            "ppow/even_windows": Mean(sums[Total.EVEN], windows),
            "ppow/score": Mean(sums[Total.SCORE], windows),
            "ppow/hard_share": Mean(sums[Total.HARD], windows),
        }
