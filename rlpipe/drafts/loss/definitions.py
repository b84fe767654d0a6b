"""An objective with its settings: computes numerator and denominator of the loss from row statistics.

The losses and their notation are in `rlpipe.drafts.objectives.supervised`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.objectives.supervised import Supervised, supervised
from rlpipe.drafts.visit import by_sequence, visit_probabilities


@dataclass(slots=True, kw_only=True)
class Objective:
    """One objective with its settings.

    kind: name of the objective. anchors: how anchors are weighted, or [N] weights. turn_starts: [B, T] with N
    = B * T, for `verify_steps` and `visit`. normalizer: divides the summed loss; None for this call's own
    weight. formula: the loss of `kind`. Raises ValueError where kind or anchors need turn_starts, and for a
    kind that learns from windows.
    """

    kind: DraftObjective
    anchors: AnchorWeighting | Tensor = AnchorWeighting.UNIFORM
    turn_starts: Tensor | None = None
    normalizer: float | Tensor | None = None
    formula: Supervised = field(init=False)

    def __post_init__(self) -> None:
        self.formula = supervised(self.kind)
        if self.full_sequence and self.turn_starts is None:
            raise ValueError(
                f"kind={self.kind}, anchors={self.anchors} follow verify steps through turns; "
                "got turn_starts=None. Pass the [B, T] bool of `depth_targets`, with N = B * T."
            )

    @property
    def visiting(self) -> bool:
        """Whether anchors are weighted by visits."""
        return isinstance(self.anchors, str) and AnchorWeighting(self.anchors) is AnchorWeighting.VISIT

    @property
    def full_sequence(self) -> bool:
        """Whether the gradient of an anchor depends on other anchors."""
        return self.visiting or self.formula.by_sequence is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether the loss reads realised tokens."""
        return self.visiting or self.formula.needs_tokens

    def total_and_weight(self, rows: Rows, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute numerator and denominator of the loss, scalars.

        rows, mask: [N, K]; they must cover all N anchors if full_sequence.
        """
        if self.formula.by_sequence is not None:
            assert self.turn_starts is not None, self.kind
            return self.formula.by_sequence(rows, mask, self.turn_starts)

        weights = self.anchor_weights(rows, mask)[:, None]
        if self.formula.by_chain is not None:
            mask = mask.cumprod(1).bool()
            accepted = self.formula.by_chain(rows, mask)
            total = (weights * mask).sum() - (weights[:, 0] * accepted).sum()
        else:
            assert self.formula.by_depth is not None, self.kind
            total = (weights * mask * self.formula.by_depth(rows)).sum()
        return total, (weights * mask).sum()

    def divide(self, total: Tensor, weight: Tensor) -> Tensor:
        """Divide the numerator, a scalar, by `normalizer` or else by the weight; 0 if all rows are masked."""
        divisor = weight if self.normalizer is None else self.normalizer
        divisor = torch.as_tensor(divisor, dtype=total.dtype, device=total.device)
        return total / divisor.where(divisor > 0, 1)

    def anchor_weights(self, rows: Rows, mask: Tensor) -> Tensor:
        """Compute detached weights of anchors, [N]."""
        if isinstance(self.anchors, Tensor):
            return self.anchors.detach().to(rows.alpha.dtype)
        if not self.visiting:
            return torch.ones_like(rows.alpha[:, 0])

        assert self.turn_starts is not None, self.kind
        accept, mask = by_sequence(rows, mask, self.turn_starts)
        return visit_probabilities(accept.detach(), mask, self.turn_starts).flatten().to(rows.alpha.dtype)
