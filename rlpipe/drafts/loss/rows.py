"""Row statistics as one differentiable function, over vocabulary shards and backends.

Owns the order of passes, the reductions and the choice of saved tensors. The backends own the passes
(`torch_rows`, `rlpipe.drafts.kernels.tv`), `definitions` owns the objectives. Flow:

    normalizers --MAX, SUM--> overlaps --SUM--> Rows [N, K] --objective--> coefficients --> gradient

The forward pass has three packed all-reduces over the tensor-parallel group, the backward pass none. Saved
for the backward pass are the draft's logits, one bit per token and [N, K] numbers; the target's logits are
saved only for a KL term.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.config.choice import Choice
from rlpipe.drafts.loss import torch_rows
from rlpipe.drafts.loss.torch_rows import Sums


class Backend(Choice):
    """Implementation of the passes over the vocabulary."""

    AUTO = "auto"  # triton for CUDA tensors where it is installed, else torch
    TORCH = "torch"
    TRITON = "triton"


@dataclass(slots=True, kw_only=True)
class Rows:
    """The statistics that an objective may depend on, each [N, K]; masked rows hold 0.

    Gradients flow to the draft through alpha (overlap, in [0, 1]), kl (target || draft), reverse_kl, and
    draft_logprob of the realised token. The other statistics are constants; see `MtpStats` for their meaning.
    """

    alpha: Tensor
    kl: Tensor
    reverse_kl: Tensor
    draft_logprob: Tensor
    target_logprob: Tensor
    draft_entropy: Tensor
    target_entropy: Tensor
    target_above: Tensor
    draft_above: Tensor
    top1: Tensor

    def leaves(self) -> list[Tensor]:
        """Return the differentiable statistics, [N, K] each, in the order of `Coefficients`."""
        return [self.alpha, self.kl, self.reverse_kl, self.draft_logprob]

    def with_leaves(self, leaves: list[Tensor]) -> Rows:
        """Return a copy with these tensors [N, K] as the differentiable statistics."""
        alpha, kl, reverse_kl, draft_logprob = leaves
        return replace(self, alpha=alpha, kl=kl, reverse_kl=reverse_kl, draft_logprob=draft_logprob)

    @classmethod
    def zeros(cls, mask: Tensor, dtype: torch.dtype) -> Rows:
        """Make rows of the shape of `mask`, [N, K], to be filled by `put`."""
        return cls(**{f.name: torch.zeros(mask.shape, dtype=dtype, device=mask.device) for f in fields(cls)})

    def put(self, part: slice, rows: Rows) -> None:
        """Write the rows of some anchors."""
        for field in fields(Rows):
            getattr(self, field.name)[part] = getattr(rows, field.name)


@dataclass(slots=True, kw_only=True)
class Measured:
    """Rows, and the inputs of the gradient other than the logits.

    sums: [len(Sums), N, K]. lse: log-sum-exp of draft and target. tokens: ids in the shard's numbering.
    """

    rows: Rows
    sums: Tensor
    lse: tuple[Tensor, Tensor]
    bits: Tensor | None
    tokens: Tensor | None


def resolve_backend(backend: Backend | str, logits: Tensor) -> ModuleType:
    """Return the module with `normalizers`, `overlaps` and `gradient`; auto depends on the logits' device."""
    backend = Backend(backend)
    if backend is Backend.AUTO:
        backend = Backend.TRITON if logits.is_cuda and find_spec("triton") else Backend.TORCH
    if backend is Backend.TORCH:
        return torch_rows

    from rlpipe.drafts.kernels import tv

    return tv


def measure(
    draft: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    tokens: Tensor | None,
    temperature: float,
    group: dist.ProcessGroup | None,
    backend: ModuleType,
    keep_bits: bool,
) -> Measured:
    """Measure all rows, reduced over the shards of `group`. draft, target: [N, K, V of the shard]."""
    (z_max, z_lse), (y_max, y_lse) = (backend.normalizers(x, temperature) for x in (draft, target))
    # Combine the log-sum-exps of the shards, relative to the largest logit of all shards.
    if group is not None:
        extremes = torch.stack([z_lse, y_lse, z_max, y_max])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        largest_lse, (z_max, y_max) = extremes[:2], extremes[2:].unbind(0)
        shares = (torch.stack([z_lse, y_lse]) - largest_lse).exp()
        dist.all_reduce(shares, group=group)
        z_lse, y_lse = (largest_lse + shares.log()).unbind(0)

    sums, bits = backend.overlaps(
        draft, target, (z_max, y_max), (z_lse, y_lse), temperature, keep_bits=keep_bits
    )

    # The realised token belongs to one shard; the others add 0.
    local = None
    if tokens is not None:
        offset = 0 if group is None else dist.get_rank(group) * draft.shape[2]
        local = tokens - offset
    picked = [_picked(x, local, temperature) for x in (draft, target)]
    if group is not None:
        packed = torch.cat([sums, torch.stack(picked)])
        dist.all_reduce(packed, group=group)
        sums, picked = packed[: len(Sums)], packed[len(Sums) :].unbind(0)

    rows = _rows(sums, [logit - lse for logit, lse in zip(picked, (z_lse, y_lse), strict=True)], mask)
    if tokens is None:
        rows.draft_logprob, rows.target_logprob = (torch.zeros_like(rows.alpha) for _ in range(2))
    return Measured(rows=rows, sums=sums, lse=(z_lse, y_lse), bits=bits, tokens=local)


def first_choices(
    draft: Tensor, target: Tensor, measured: Measured, temperature: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Compute p(argmax q), the acceptance under target-only, and 1[realised token = argmax q]: [2, N, K].

    draft, target: [N, K, V of the shard]. measured: must include the realised tokens.
    """
    # Under tensor parallelism the argmax belongs to the shard with the largest logit.
    largest, choice = draft.max(-1)
    here = torch.ones_like(largest, dtype=torch.bool)
    if group is not None:
        overall = largest.clone()
        dist.all_reduce(overall, dist.ReduceOp.MAX, group)
        here = largest == overall

    dtype = measured.rows.alpha.dtype
    logit = target.gather(-1, choice[..., None])[..., 0].to(dtype) / temperature
    target_prob, agrees = (logit - measured.lse[1]).exp(), (choice == measured.tokens).to(dtype)
    chosen = torch.stack([target_prob, agrees]) * here
    if group is not None:
        dist.all_reduce(chosen, dist.ReduceOp.MAX, group)
    return chosen.clamp(0, 1)


def _picked(logits: Tensor, local: Tensor | None, temperature: float) -> Tensor:
    """Return [N, K]: logit / temperature of the realised token if it is in this shard, else 0."""
    dtype = torch_rows.compute_dtype(logits)
    if local is None:
        return torch.zeros(logits.shape[:2], dtype=dtype, device=logits.device)

    here = (local >= 0) & (local < logits.shape[2])
    values = logits.gather(-1, local.where(here, 0)[..., None])[..., 0].to(dtype) / temperature
    return torch.where(here, values, 0)


def _rows(sums: Tensor, logprobs: list[Tensor], mask: Tensor) -> Rows:
    """Return the statistics of rows from sums over the vocabulary, 0 where they are masked."""

    def masked(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0)

    return Rows(
        alpha=masked(sums[Sums.ALPHA].clamp(0, 1)),
        kl=masked(sums[Sums.KL]),
        reverse_kl=masked(sums[Sums.REVERSE_KL]),
        draft_logprob=masked(logprobs[0].clamp(min=torch_rows.FLOOR)),
        target_logprob=masked(logprobs[1].clamp(min=torch_rows.FLOOR)),
        draft_entropy=masked(sums[Sums.DRAFT_ENTROPY]),
        target_entropy=masked(sums[Sums.TARGET_ENTROPY]),
        target_above=masked(sums[Sums.TARGET_ABOVE]),
        draft_above=masked((1 - sums[Sums.COVERED]).clamp(0, 1)),
        top1=masked((sums[Sums.TOP1] > 0).to(sums.dtype)),
    )


def row_statistics(
    draft: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    tokens: Tensor | None,
    temperature: float,
    group: dist.ProcessGroup | None,
    backend: ModuleType,
    needs_target: bool,
) -> Rows:
    """Measure rows that are differentiable by `draft`, [N, K, V]; the target is a constant.

    needs_target: whether the objective has a KL term, whose gradient reads the target again.
    """
    names = [f.name for f in fields(Rows)]
    out = _RowStatistics.apply(
        draft, target.detach(), mask, tokens, temperature, group, backend, needs_target, names
    )
    return Rows(**dict(zip(names, out, strict=True)))


def keep_largest(logits: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Set all but the largest logits of each row to -inf, over the shards of `group`: [..., V] -> same.

    Differentiable. Logits equal to the last of the `count` are retained as well.

    >>> keep_largest(torch.tensor([3.0, 1.0, 2.0]), 2, None).tolist()
    [3.0, -inf, 2.0]
    """
    largest = logits.detach().topk(min(count, logits.shape[-1]), -1).values
    if group is not None:
        shards = [torch.empty_like(largest) for _ in range(group.size())]
        dist.all_gather(shards, largest.contiguous(), group)
        largest = torch.cat(shards, -1)
        largest = largest.topk(min(count, largest.shape[-1]), -1).values
    return logits.masked_fill(logits.detach() < largest[..., -1:], -torch.inf)


class _RowStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, draft, target, mask, tokens, temperature, group, backend, needs_target, names
    ) -> tuple[Tensor, ...]:
        measured = measure(
            draft,
            target,
            mask,
            tokens=tokens,
            temperature=temperature,
            group=group,
            backend=backend,
            keep_bits=not needs_target and draft.requires_grad,
        )

        # If no KL term reads the target's logits again, save only the bits.
        ctx.temperature, ctx.backend = temperature, backend
        target_inputs = (target, measured.lse[1]) if needs_target else (None, None)
        ctx.save_for_backward(
            draft, measured.lse[0], measured.sums, mask, measured.tokens, measured.bits, *target_inputs
        )

        out = tuple(getattr(measured.rows, name) for name in names)
        ctx.mark_non_differentiable(*out[4:])
        return out

    @staticmethod
    def backward(ctx, *grads) -> tuple[Tensor | None, ...]:
        draft, lse, sums, mask, tokens, bits, target, target_lse = ctx.saved_tensors
        coefficients = torch.stack(grads[:4])
        grad = ctx.backend.gradient(
            draft,
            lse,
            sums,
            coefficients,
            mask,
            ctx.temperature,
            tokens=tokens,
            bits=bits,
            target=target,
            target_lse=target_lse,
        )
        return grad, *[None] * 8
