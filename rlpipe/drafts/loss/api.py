"""`mtp_loss`: computes an objective from logits. Owns only argument checks; other modules do the rest."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.drafts.loss.definitions import Objective
from rlpipe.drafts.loss.rows import Backend, Rows, keep_largest, resolve_backend, row_statistics
from rlpipe.drafts.loss.stats import MtpStats
from rlpipe.drafts.visit import accept_probabilities, forecast


def mtp_loss(
    kind: DraftObjective | str,
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    mask: Tensor,
    tokens: Tensor | None = None,
    anchors: AnchorWeighting | Tensor = AnchorWeighting.UNIFORM,
    turn_starts: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    normalizer: float | Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, MtpStats]:
    """Compute the loss of a draft against its target, and per-depth statistics.

    kind: see `DraftObjective`; each is defined in `rlpipe.drafts.objectives.supervised`. draft_logits,
    target_logits: [N, K, V], any float dtype, any strides; -inf padding is allowed. Under tensor parallelism
    V is the shard, all shards equal, in rank order. The target is a constant. mask: [N, K] bool, true for
    rows that count; other rows get a gradient of exactly 0 and may have any content.
    tokens: [N, K] int64, the realised tokens (sampled from the target for `e2e_chain`, `e2e_block`,
    `verify_steps` and visits). Statistics of acceptance lengths need tokens too.
    anchors: uniform, by visit, or [N] weights >= 0. turn_starts: [B, T] bool with N = B * T.
    temperature: the temperature of the rollout, > 0, applied to draft and target. tp_group: None where each
    rank has the full vocabulary. normalizer: divisor of the summed loss, for gradient accumulation; None:
    this call's own weight.

    Returns the scalar loss (0 where all rows are masked) and `MtpStats`, detached sums.
    Raises ValueError for arguments that contradict each other, and for an objective on hidden states.

    >>> logits = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> loss, stats = mtp_loss("tv", logits, logits, mask=torch.tensor([[True]]))
    >>> round(loss.item(), 6), round(stats.alpha.item(), 6)
    (0.0, 1.0)
    """
    objective = Objective(
        kind=DraftObjective(kind),
        anchors=anchors,
        turn_starts=turn_starts,
        normalizer=normalizer,
    )
    if objective.formula.features:
        raise ValueError(f"kind={kind} compares hidden states: use `linear_mtp_loss`, or another kind.")
    if draft_logits.dim() != 3 or draft_logits.shape != target_logits.shape:
        raise ValueError(
            f"draft_logits and target_logits must both be [N, K, V], got {list(draft_logits.shape)} and "
            f"{list(target_logits.shape)}. A target shared by depths can be passed as a strided view."
        )

    check_rows(objective, mask, tokens, rows=draft_logits.shape[:2], temperature=temperature)
    measure_rows = partial(
        row_statistics,
        target=target_logits,
        mask=mask,
        tokens=tokens,
        temperature=temperature,
        group=tp_group,
        backend=resolve_backend(backend, draft_logits),
        needs_target=objective.formula.needs_target,
    )
    if (top := objective.formula.top) is None:
        rows = loss_rows = measure_rows(draft_logits)
    else:
        rows = measure_rows(draft_logits.detach())
        loss_rows = measure_rows(keep_largest(draft_logits, top, tp_group))

    total, weight = objective.total_and_weight(loss_rows, mask)
    stats = statistics(objective, rows, mask, total=total, weight=weight, has_tokens=tokens is not None)
    return objective.divide(total, weight), stats


def check_rows(
    objective: Objective, mask: Tensor, tokens: Tensor | None, *, rows: torch.Size, temperature: float
) -> None:
    """Raise ValueError where mask, tokens or temperature do not match `rows`, [N, K]."""
    if mask.shape != rows or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool {list(rows)}, got {mask.dtype} {list(mask.shape)}.")
    if tokens is not None and tokens.shape != rows:
        raise ValueError(f"tokens must be {list(rows)}, one per row, got {list(tokens.shape)}.")
    if tokens is None and objective.needs_tokens:
        raise ValueError(
            f"kind={objective.kind}, anchors={objective.anchors} compare realised tokens; pass tokens=[N, K]."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; a greedy rollout has no overlap.")


def statistics(
    objective: Objective, rows: Rows, mask: Tensor, *, total: Tensor, weight: Tensor, has_tokens: bool
) -> MtpStats:
    """Sum all rows [N, K], and forecast an engine's counts where turns and realised tokens are known.

    mask: [N, K] bool. total, weight: scalars, numerator and denominator of the loss.
    """
    visits = None
    if has_tokens and objective.turn_starts is not None:
        shape = (*objective.turn_starts.shape, -1)
        accept = accept_probabilities(rows.draft_logprob.detach(), rows.target_logprob)
        visits = forecast(accept.view(shape), mask.view(shape), objective.turn_starts)
    return MtpStats.from_rows(rows, mask, loss=total, weight=weight, visits=visits)
