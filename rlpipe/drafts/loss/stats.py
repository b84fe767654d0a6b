"""Per-depth statistics of a draft, as sums and counts that can be added over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.visit import VisitForecast
from rlpipe.metrics.values import Mean, Ratio, Value

BY_DEPTH = (
    "alpha",
    "draft_entropy",
    "target_entropy",
    "kl",
    "reverse_kl",
    "target_above",
    "draft_above",
    "top1",
)


@dataclass(slots=True, kw_only=True)
class MtpStats:
    """Sums over unmasked rows of each depth, [K] float64 unless stated; summing never waits for the device.

    count: rows. alpha: overlap sum_v min(p, q), the acceptance rate under rejection. draft_entropy,
    target_entropy, kl (target || draft), reverse_kl: nats. target_above: mass of the target where p > q.
    draft_above: mass of the draft where q > p. Bebop Fig. 11 plots two parts of alpha without defining them.
    With ties counted as q < p they are alpha_{q>p} = sum_{q>p} p = 1 - target_above and alpha_{p>q} =
    sum_{p>q} q = 1 - draft_above. top1: draft and target share a most likely token. drafted, accepted:
    expected counts of an engine on these sequences, defined as in `SpecCounts`; zeros without turns.
    verify_steps, emitted: scalars, the expected verify steps and the tokens they emit.
    loss, weight: scalars, numerator and denominator of the loss.
    """

    count: Tensor
    alpha: Tensor
    draft_entropy: Tensor
    target_entropy: Tensor
    kl: Tensor
    reverse_kl: Tensor
    target_above: Tensor
    draft_above: Tensor
    top1: Tensor
    drafted: Tensor
    accepted: Tensor
    verify_steps: Tensor
    emitted: Tensor
    loss: Tensor
    weight: Tensor

    @classmethod
    def from_rows(
        cls, rows: Rows, mask: Tensor, *, loss: Tensor, weight: Tensor, visits: VisitForecast | None
    ) -> MtpStats:
        """Sum rows [N, K] whose masked entries are 0.

        mask: [N, K] bool. loss, weight: scalars. visits: forecast for the same anchors; None: leave the
        engine counts 0.
        """
        depth = {name: getattr(rows, name).detach().double().sum(0) for name in BY_DEPTH}
        zeros = torch.zeros_like(depth["alpha"])
        return cls(
            **depth,
            count=mask.sum(0).double(),
            drafted=zeros.clone() if visits is None else visits.drafted.sum(0),
            accepted=zeros.clone() if visits is None else visits.accepted.sum(0),
            verify_steps=zeros[0].clone() if visits is None else visits.verify_steps.sum(),
            emitted=zeros[0].clone() if visits is None else visits.emitted.sum(),
            loss=loss.detach().double(),
            weight=weight.detach().double(),
        )

    def __add__(self, other: MtpStats) -> MtpStats:
        """Add two sums of equal depths."""
        return MtpStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(MtpStats)})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> MtpStats:
        """Sum over ranks that saw different rows (data parallel, not tensor parallel), in one message."""
        values = [getattr(self, f.name) for f in fields(MtpStats)]
        packed = torch.cat([value.flatten() for value in values])
        dist.all_reduce(packed, group=group)

        parts = packed.split([value.numel() for value in values])
        return MtpStats(
            **{
                f.name: part.view_as(value)
                for f, part, value in zip(fields(MtpStats), parts, values, strict=True)
            }
        )

    def metrics(self) -> dict[str, Value]:
        """Return metrics by name, such as `mtp/alpha/depth_1`; copies from the device once."""
        metrics: dict[str, Value] = {"mtp/loss": Mean(self.loss, self.weight)}
        table = torch.stack([getattr(self, name) for name in BY_DEPTH] + [self.count]).tolist()
        for name, sums in zip(BY_DEPTH, table[:-1], strict=True):
            for depth, (total, count) in enumerate(zip(sums, table[-1], strict=True), 1):
                metrics[f"mtp/{name}/depth_{depth}"] = Mean(total, count)
        if self.emitted > 0:
            metrics["mtp/predicted_acceptance_length"] = Ratio(self.emitted, self.verify_steps)

        return metrics


def no_stats(depths: int, device: torch.device) -> MtpStats:
    """Return the statistics of no rows."""
    scalars = ("verify_steps", "emitted", "loss", "weight")
    return MtpStats(
        **{
            f.name: torch.zeros(() if f.name in scalars else depths, dtype=torch.float64, device=device)
            for f in fields(MtpStats)
        }
    )
