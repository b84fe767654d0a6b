"""Fused head and loss: computes the loss from hidden states without a [N, K, V] tensor.

Owns the loop over anchors; the passes over the vocabulary and the objectives are shared with `mtp_loss`. Per
chunk of C anchors there are K * C draft rows and one target row per position. The depths share the target
rows through a halo (depth k at anchor n is compared with position n + k):

    z = draft_hidden[n : n + C] W^T         [C, K, V]
    y = target_hidden[n + 1 : n + C + K] W^T       [C + K - 1, V], seen as [C, K, V] by strides
    measure(z, y) -> rows -> coefficients -> dz -> dz W added to the hidden gradient, chunk freed

Stretches without an unmasked anchor (prompts, padding) are skipped; finding them reads the mask on the host.
No product is computed twice, with one exception: where the gradient of an anchor depends on all others
(`verify_steps`, visit weights), a first pass measures and a second one recomputes the logits. The gradient is
complete after the forward pass; the backward pass only scales it. Until then the gradient of the hidden
states, [N, K, H], and on request the gradient of the head, are stored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.drafts.loss.api import check_rows, statistics
from rlpipe.drafts.loss.definitions import Objective
from rlpipe.drafts.loss.rows import (
    Backend,
    Measured,
    Rows,
    first_choices,
    keep_largest,
    measure,
    resolve_backend,
)
from rlpipe.drafts.loss.stats import MtpStats
from rlpipe.drafts.loss.torch_rows import compute_dtype
from rlpipe.drafts.objectives.supervised import feature_distance
from rlpipe.drafts.vocabulary import spread

CHUNK_BYTES = {"cuda": 2**27, "cpu": 2**24}  # draft logits in memory at once
HEAD_BLOCK = 2**14  # rows of the head whose gradient is computed at once


def linear_mtp_loss(
    kind: DraftObjective | str,
    draft_hidden: Tensor,
    target_hidden: Tensor,
    *,
    head_weight: Tensor,
    mask: Tensor,
    tokens: Tensor | None = None,
    anchors: AnchorWeighting | Tensor = AnchorWeighting.UNIFORM,
    turn_starts: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    normalizer: float | Tensor | None = None,
    train_head: bool = False,
    vocab: int | None = None,
    draft_ids: Tensor | None = None,
    chunk_bytes: int | None = None,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, MtpStats]:
    """Compute `mtp_loss` of the logits `draft_hidden W^T` and `target_hidden W^T`, a chunk at a time.

    draft_hidden: [N, K, H]; index k - 1 is depth k at each anchor. target_hidden: [N + extra, H], extra >= 0,
    the backbone's state at each position, a constant. Depth k at anchor n is compared with row n + k. The
    mask must exclude depths beyond the last row and, if several sequences are concatenated, depths that reach
    into the next sequence. head_weight: [V, H], a constant unless train_head. Under tensor parallelism it is
    this rank's shard; the hidden states are complete and equal on all ranks, and so is the gradient of the
    hidden states. vocab: how many rows of head_weight are tokens, None for all; later rows pad the shard and
    are never sampled. draft_ids: [D] int64, ascending: the rows of head_weight (of the shard) that the draft
    uses, None for all. Other tokens are outside the draft's vocabulary, see `drafts.vocabulary`. chunk_bytes:
    limit of the draft logits in memory at once, None for the device's default. For the other arguments see
    `mtp_loss`.
    """
    objective = Objective(
        kind=DraftObjective(kind),
        anchors=anchors,
        turn_starts=turn_starts,
        normalizer=normalizer,
    )
    if draft_hidden.dim() != 3 or target_hidden.dim() != 2 or len(target_hidden) < len(draft_hidden):
        raise ValueError(
            f"draft_hidden must be [N, K, H] and target_hidden [N + extra, H], got "
            f"{list(draft_hidden.shape)} and {list(target_hidden.shape)}. Flatten [B, T] into N."
        )

    check_rows(objective, mask, tokens, rows=draft_hidden.shape[:2], temperature=temperature)
    walk = _Walk(
        objective=objective,
        target_hidden=target_hidden.detach(),
        mask=mask,
        tokens=tokens,
        temperature=temperature,
        group=tp_group,
        backend=resolve_backend(backend, draft_hidden),
        vocab=vocab,
        draft_ids=draft_ids,
        chunk_bytes=chunk_bytes,
        wants_gradient=torch.is_grad_enabled(),
    )
    head_weight = head_weight if train_head else head_weight.detach()
    total = _LinearTotal.apply(draft_hidden, head_weight, walk)
    assert walk.result is not None
    weight, stats, rows = walk.result

    if objective.formula.features:
        weights = objective.anchor_weights(rows, mask)[:, None] * mask
        distance = feature_distance(draft_hidden.where(mask[..., None], 0), target_hidden)
        features = (weights * distance.where(mask, 0)).sum()
        total = total + features
        stats.loss += features.detach()
    return objective.divide(total, weight), stats


@torch.no_grad()
def linear_draft_rows(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    *,
    head_weight: Tensor,
    mask: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab: int | None = None,
    draft_ids: Tensor | None = None,
    chunk_bytes: int | None = None,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Rows, Tensor]:
    """Compute the statistics of every row instead of their sums; arguments as in `linear_mtp_loss`.

    Returns the rows, and `first_choices` [2, N, K], 0 where masked.
    """
    walk = _Walk(
        objective=Objective(kind=DraftObjective.TV, anchors=AnchorWeighting.UNIFORM, turn_starts=None),
        target_hidden=target_hidden,
        mask=mask,
        tokens=tokens,
        temperature=temperature,
        group=tp_group,
        backend=resolve_backend(backend, draft_hidden),
        vocab=vocab,
        draft_ids=draft_ids,
        chunk_bytes=chunk_bytes,
        wants_gradient=False,
    )
    rows = Rows.zeros(mask, compute_dtype(draft_hidden))
    top = torch.zeros(2, *mask.shape, dtype=rows.alpha.dtype, device=mask.device)
    for part, draft, target in walk.chunks(draft_hidden, head_weight):
        measured = walk.measured(part, draft, target)
        rows.put(part, measured.rows)

        top[:, part] = first_choices(draft, target, measured, temperature, tp_group) * mask[part]
    return rows, top


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The constants of one call, and its results except the numerator: weight, statistics and rows."""

    objective: Objective
    target_hidden: Tensor
    mask: Tensor
    tokens: Tensor | None
    temperature: float
    group: dist.ProcessGroup | None
    backend: ModuleType
    vocab: int | None
    draft_ids: Tensor | None
    chunk_bytes: int | None
    wants_gradient: bool
    anchors: list[int] = field(init=False)  # anchors with an unmasked row
    result: tuple[Tensor, MtpStats, Rows] | None = None

    def __post_init__(self) -> None:
        self.anchors = self.mask.any(1).nonzero().flatten().tolist()

    def draft_weight(self, weight: Tensor) -> Tensor:
        """Select the rows of the head that the draft uses."""
        return weight if self.draft_ids is None else weight.detach().index_select(0, self.draft_ids)

    def chunks(self, draft_hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield anchors, draft logits [C, K, V], and the target's as a strided view of [C + K - 1, V]."""
        depths = draft_hidden.shape[1]
        budget = self.chunk_bytes or CHUNK_BYTES["cuda" if self.mask.is_cuda else "cpu"]
        step = max(1, budget // (depths * weight.shape[0] * draft_hidden.element_size()))
        draft_weight = self.draft_weight(weight)
        for part in spans(self.anchors, step):
            rows = torch.arange(part.start + 1, part.stop + depths, device=weight.device)
            target = self.target_hidden[rows.clamp(max=len(self.target_hidden) - 1)] @ weight.T
            draft = draft_hidden[part] @ draft_weight.T
            if self.draft_ids is not None:
                draft = spread(
                    draft, self.draft_ids, len(weight), temperature=self.temperature, group=self.group
                )
            if self.vocab is not None:
                for logits in (draft, target):
                    logits[..., self.vocab :] = -torch.inf
            shared = target.unfold(0, part.stop - part.start, 1).permute(2, 0, 1)
            yield part, draft, shared

    def measured(self, part: slice, draft: Tensor, target: Tensor) -> Measured:
        """Measure the rows of a chunk."""
        return measure(
            draft,
            target,
            self.mask[part],
            tokens=None if self.tokens is None else self.tokens[part],
            temperature=self.temperature,
            group=self.group,
            backend=self.backend,
            keep_bits=False,
        )

    def measured_for_loss(
        self, part: slice, logits: Sequence[Tensor], measured: Measured
    ) -> tuple[tuple[Tensor, Tensor], Measured]:
        """Return the logits and rows that the loss reads; it may read only the draft's largest logits."""
        draft, target = logits
        if (top := self.objective.formula.top) is None:
            return (draft, target), measured
        largest = keep_largest(draft, top, self.group)
        return (largest, target), self.measured(part, largest, target)

    def coefficients(self, rows: Rows, part: slice) -> Tensor:
        """Return [len(Coefficients), C, K]: derivatives of the summed loss by statistics of some anchors."""
        objective = self.objective
        if isinstance(objective.anchors, Tensor):
            objective = replace(objective, anchors=objective.anchors[part])
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in rows.leaves()]
            total, _ = objective.total_and_weight(rows.with_leaves(leaves), self.mask[part])
            return torch.stack(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))

    def add_gradient(
        self,
        part: slice,
        logits: tuple[Tensor, Tensor],
        measured: Measured,
        *,
        coefficients: Tensor,
        inputs: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
    ) -> None:
        """Write a chunk's gradient of the hidden states, and add its gradient of the head, in float32.

        inputs: hidden states, and the rows of the head that the draft uses. grads: gradients of hidden states
        and head.
        """
        dz = self.backend.gradient(
            logits[0],
            measured.lse[0],
            measured.sums,
            coefficients,
            self.mask[part],
            self.temperature,
            tokens=measured.tokens,
            bits=None,
            target=logits[1],
            target_lse=measured.lse[1],
        )

        hidden, weight = inputs
        if self.draft_ids is not None:
            dz = self._by_known(dz, logits[0], measured.lse[0], self.mask[part])

        torch.matmul(dz, weight, out=grads[0][part])
        if grads[1] is not None:
            flat, rows = hidden[part].flatten(0, 1), dz.flatten(0, 1)
            if self.draft_ids is not None:
                grads[1].index_add_(0, self.draft_ids, (rows.T @ flat).to(grads[1].dtype))
                return
            for block, columns in zip(grads[1].split(HEAD_BLOCK), rows.split(HEAD_BLOCK, dim=1), strict=True):
                block += columns.T @ flat

    def _by_known(self, dz: Tensor, draft: Tensor, lse: Tensor, mask: Tensor) -> Tensor:
        """Compute the gradient [C, K, D] of the known logits from the gradient of all logits of `spread`.

        `spread` sets the unknown logits to a log-sum-exp of the known logits. So the gradient of the unknown
        logits is distributed over the known logits in proportion to q. The gradient of a softmax sums to 0
        over all logits, so the amount to distribute is minus the sum over the known ones.
        """
        known = dz[..., self.draft_ids]
        inside = known.sum(-1, keepdim=True, dtype=lse.dtype)
        if self.group is not None:
            dist.all_reduce(inside, group=self.group)
        q = (draft[..., self.draft_ids].to(lse.dtype) / self.temperature - lse[..., None]).exp()
        return (known - q * inside).masked_fill_(~mask[..., None], 0).to(dz.dtype)


def spans(anchors: list[int], step: int) -> Iterator[slice]:
    """Yield slices of at most `step` that cover ascending anchors; each begins and ends with an anchor.

    >>> list(spans([2, 3, 4, 9, 20, 21], step=8))
    [slice(2, 10, None), slice(20, 22, None)]
    """
    first = 0
    while first < len(anchors):
        end = bisect_left(anchors, anchors[first] + step)
        yield slice(anchors[first], anchors[end - 1] + 1)
        first = end


class _LinearTotal(torch.autograd.Function):
    """Numerator of the loss; the gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, walk: _Walk) -> Tensor:
        objective = walk.objective
        needs_hidden, needs_weight = (walk.wants_gradient and needed for needed in ctx.needs_input_grad[:2])
        # Under tensor parallelism a rank's share of the hidden gradient is summed at the end.
        grad_hidden = torch.zeros_like(hidden) if needs_hidden or needs_weight else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        draft_weight = walk.draft_weight(weight) if grad_hidden is not None else weight

        # Most objectives need one pass: a chunk's gradient depends on its own rows.
        rows, loss_rows = (Rows.zeros(walk.mask, compute_dtype(hidden)) for _ in range(2))
        for part, *logits in walk.chunks(hidden, weight):
            measured = walk.measured(part, *logits)
            rows.put(part, measured.rows)
            used, measured = walk.measured_for_loss(part, logits, measured)
            loss_rows.put(part, measured.rows)
            if grad_hidden is not None and not objective.full_sequence:
                walk.add_gradient(
                    part,
                    used,
                    measured,
                    coefficients=walk.coefficients(measured.rows, part),
                    inputs=(hidden, draft_weight),
                    grads=(grad_hidden, grad_weight),
                )

        # The others need all rows first, and compute the logits a second time.
        if grad_hidden is not None and objective.full_sequence:
            coefficients = walk.coefficients(loss_rows, slice(None))
            for part, *logits in walk.chunks(hidden, weight):
                used, measured = walk.measured_for_loss(part, logits, walk.measured(part, *logits))
                walk.add_gradient(
                    part,
                    used,
                    measured,
                    coefficients=coefficients[:, part],
                    inputs=(hidden, draft_weight),
                    grads=(grad_hidden, grad_weight),
                )
        if needs_hidden and walk.group is not None:
            dist.all_reduce(grad_hidden, group=walk.group)

        total, divisor = objective.total_and_weight(loss_rows, walk.mask)
        has_tokens = walk.tokens is not None
        stats = statistics(objective, rows, walk.mask, total=total, weight=divisor, has_tokens=has_tokens)
        walk.result = divisor, stats, loss_rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.head_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight = ctx.saved_tensors
        by_hidden = by_hidden * grad_total if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            by_weight = (by_weight * grad_total).to(ctx.head_dtype)
        return by_hidden, by_weight, None
