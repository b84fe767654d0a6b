"""What a PPOW step reports: sums over windows, and the metrics they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.metrics.values import Mean, Value


class Total(IntEnum):
    """What is summed over windows."""

    WINDOWS = 0
    DRAFTS = auto()
    LOSS = auto()
    REWARD = auto()
    ACCEPTED = auto()
    REJECTED = auto()  # windows of which nothing was accepted
    CLOSE = auto()  # of these, those that earn R_dist
    EVEN = auto()  # windows that earn what all their siblings do: no advantage
    KL = auto()
    CLIPPED = auto()
    SCORE = auto()
    HARD = auto()


@dataclass(slots=True, kw_only=True)
class PpowTotals:
    """sums: [len(Total)] float64, on the device; they add over micro-batches and ranks."""

    sums: Tensor

    @property
    def weight(self) -> Tensor:
        """Denominator of the loss."""
        return self.sums[Total.DRAFTS]

    @classmethod
    def nothing(cls, device: torch.device) -> PpowTotals:
        """Totals of no window."""
        return cls(sums=torch.zeros(len(Total), dtype=torch.float64, device=device))

    @classmethod
    def of(cls, values: Mapping[Total, Tensor | float], device: torch.device) -> PpowTotals:
        """Totals by name, scalars; all of them."""
        found = cls.nothing(device)
        for name in Total:
            found.sums[name] = values[name]
        return found

    def __add__(self, other: PpowTotals) -> PpowTotals:
        return PpowTotals(sums=self.sums + other.sums)

    def all_reduce(self, group: dist.ProcessGroup) -> PpowTotals:
        """Sums over data parallel ranks."""
        sums = self.sums.clone()
        dist.all_reduce(sums, group=group)
        return PpowTotals(sums=sums)

    def metrics(self) -> dict[str, Value]:
        """`ppow/*`; reads the device once."""
        of = dict(zip(Total, self.sums.tolist(), strict=True))
        windows, drafts = of[Total.WINDOWS], of[Total.DRAFTS]
        return {
            "ppow/loss": Mean(of[Total.LOSS], drafts),
            "ppow/kl": Mean(of[Total.KL], drafts),
            "ppow/clip_fraction": Mean(of[Total.CLIPPED], drafts),
            "ppow/reward": Mean(of[Total.REWARD], windows),
            "ppow/accepted": Mean(of[Total.ACCEPTED], windows),
            "ppow/rejected_windows": Mean(of[Total.REJECTED], windows),
            "ppow/close_windows": Mean(of[Total.CLOSE], of[Total.REJECTED]),
            "ppow/even_windows": Mean(of[Total.EVEN], windows),
            "ppow/score": Mean(of[Total.SCORE], windows),
            "ppow/hard_share": Mean(of[Total.HARD], windows),
        }
