"""Log-probabilities and entropy of a softmax with its vocabulary cut over tensor parallel ranks.

Owns the math and its gradient, and computes logprobs of further tokens of the same rows. Given logits, an
autograd function works in chunks of rows and saves only the logits for the backward pass (no [N, V] softmax).
Given hidden states (`Head`), the logits of only one chunk of rows exist at a time, and the backward pass
computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

HEAD_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # limit of the logits in memory at once
HEAD_BLOCK = 1 << 14  # rows of the head added to its gradient at once
CHUNK_ELEMENTS = 1 << 24
CACHE_ELEMENTS = 1 << 17  # that fit in a CPU's second-level cache


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log p(target) and entropy H(p) of p = softmax(logits / temperature), in nats.

    logits: [N, V_local], this rank's columns, starting at token id vocab_start. targets: [N] int64,
    global token ids. Returns two tensors [N] float32, differentiable.

        d logp / d z_j = 1[j = y] - p_j          d H / d z_j = -p_j (log p_j + H)          z = logits / T

    >>> logp, entropy = token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    >>> round(logp.item(), 4), round(entropy.item(), 4)
    (-1.3863, 1.3863)
    """
    return _TokenLogprobs.apply(logits, targets, temperature, vocab_start, group)


@torch.no_grad()
def candidate_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    targets: torch.Tensor,
    logprobs: torch.Tensor,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Compute log p of further tokens in rows with known target logprobs: [N, K] float32, no gradient.

        log p_i = log p_y + (logit_i - logit_y) / T          y: the target

    So a second pass over the vocabulary is not needed, and ranks exchange [N, K + 1] numbers once. logits,
    targets, temperature, vocab_start: the arguments of `token_logprobs`. logprobs: [N], its result. ids:
    [N, K] int64, global token ids; -1 is padding and gives -inf.

    >>> logits, ids = torch.tensor([[0.0, 0.0, 0.0, 9.0]]), torch.tensor([[3, 1, -1]])
    >>> logp, _ = token_logprobs(logits, torch.tensor([3]))
    >>> candidate_logprobs(logits, ids, targets=torch.tensor([3]), logprobs=logp).round(decimals=2)
    tensor([[-0., -9., -inf]])
    """
    local = torch.cat([ids, targets[:, None]], 1) - vocab_start
    is_local = (local >= 0) & (local < logits.shape[1])

    # Exactly one rank has each token; the others add 0.
    selected = logits.gather(1, torch.where(is_local, local, 0)).float() * is_local
    selected = _reduce(selected, group, dist.ReduceOp.SUM)

    candidates = logprobs[:, None] + (selected[:, :-1] - selected[:, -1:]) / temperature
    return candidates.masked_fill(ids < 0, -torch.inf)


@dataclass(slots=True, kw_only=True)
class Head:
    """The output layer on hidden states [N, H]; the logits [N, V_local] are never all in memory at once.

    weight: this rank's shard, of equal size on all ranks of the group; its first `columns` rows are tokens,
    starting at id vocab_start. Hidden states and their gradient are full and equal on all ranks. For the
    backward pass, logits that fit into HEAD_BYTES are saved, and others are computed again.
    """

    weight: torch.Tensor
    columns: int
    temperature: float = 1.0
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None

    def logprobs(self, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `token_logprobs` from states [N, H]: log-probabilities and entropies, [N] each.

        targets: [N] int64, global token ids.
        """
        return _HeadLogprobs.apply(states, self.weight[: self.columns], targets, self)

    @torch.no_grad()
    def candidates(
        self, states: torch.Tensor, ids: torch.Tensor, *, targets: torch.Tensor, logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Compute `candidate_logprobs` from states [N, H]: [N, K] float32.

        ids: [N, K] int64, -1 is padding. targets, logprobs: [N], argument and result of the method
        `logprobs`.
        """
        candidates = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        for part in self.parts(states):
            candidates[part] = candidate_logprobs(
                states[part] @ self.weight[: self.columns].t(),
                ids[part],
                targets=targets[part],
                logprobs=logprobs[part],
                temperature=self.temperature,
                vocab_start=self.vocab_start,
                group=self.group,
            )
        return candidates

    def parts(self, states: torch.Tensor) -> Iterator[slice]:
        """Yield slices of the rows of states [N, H] for computing logits; the same slices on all ranks."""
        row = self.weight.shape[0] * states.element_size()
        rows = max(1, HEAD_BYTES[states.device.type] // row)
        return (slice(i, i + rows) for i in range(0, len(states), rows))


class _Targets(NamedTuple):
    """Targets [N]: the column of each on this rank (0 if it is on another one), and whether it is here."""

    columns: torch.Tensor
    is_local: torch.Tensor

    def rows(self, part: slice) -> _Targets:
        """Select the targets of some rows."""
        return _Targets(self.columns[part], self.is_local[part])


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` from logits; saves the logits and two numbers of each row."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group):
        targets = _local_targets(targets, vocab_start, logits.shape[1])
        peak, sums = _row_sums(logits, targets, temperature)
        logp, entropy, shift = _normalised(
            peak, sums, is_local=targets.is_local, temperature=temperature, group=group
        )
        ctx.save_for_backward(logits, *targets, shift, entropy)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        logits, columns, is_local, shift, entropy = ctx.saved_tensors
        targets = _Targets(columns, is_local)
        slopes = _slopes(
            logits, targets, shift=shift, entropy=entropy, grads=grads, temperature=ctx.temperature
        )
        return slopes, None, None, None, None


class _HeadLogprobs(torch.autograd.Function):
    """`token_logprobs` from hidden states, one slice of rows at a time; see `Head`."""

    @staticmethod
    def forward(ctx, states, weight, targets, head):
        targets = _local_targets(targets, head.vocab_start, len(weight))
        parts = list(head.parts(states))
        peak = torch.empty(len(states), dtype=torch.float32, device=states.device)
        sums = torch.empty(3, len(states), dtype=torch.float32, device=states.device)

        # Only the row sums of each part are kept after its logits are freed.
        logits = None
        for part in parts:
            logits = states[part] @ weight.t()
            peak[part], sums[:, part] = _row_sums(logits, targets.rows(part), head.temperature)

        logp, entropy, shift = _normalised(
            peak, sums, is_local=targets.is_local, temperature=head.temperature, group=head.group
        )

        # If all logits fit at once, they need not be computed again for the gradient.
        saved_logits = logits if len(parts) == 1 else None
        ctx.save_for_backward(states, weight, *targets, shift, entropy, saved_logits)
        ctx.head, ctx.parts = head, parts
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        states, weight, columns, is_local, shift, entropy, saved_logits = ctx.saved_tensors
        targets = _Targets(columns, is_local)

        # The weight's gradient is a sum of many products: accumulate in float32.
        grad_states, grad_weight = torch.empty_like(states), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)

        for part in ctx.parts:
            logits = states[part] @ weight.t() if saved_logits is None else saved_logits
            slopes = _slopes(
                logits,
                targets.rows(part),
                shift=shift[part],
                entropy=entropy[part],
                grads=[grad[part] for grad in grads],
                temperature=ctx.head.temperature,
            )
            grad_states[part] = slopes @ weight

            # Add it by blocks, to avoid a second matrix of the weight's size.
            if grad_weight is not None:
                for start in range(0, len(weight), HEAD_BLOCK):
                    block = slice(start, start + HEAD_BLOCK)
                    grad_weight[block] += slopes[:, block].t() @ states[part]

        # Each rank has used only its own columns, so sum over ranks.
        _reduce(grad_states, ctx.head.group, dist.ReduceOp.SUM)
        return grad_states, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _local_targets(targets: torch.Tensor, start: int, columns: int) -> _Targets:
    """Locate targets among this rank's columns, which begin at token id `start`."""
    local = targets - start
    is_local = (local >= 0) & (local < columns)
    return _Targets(torch.where(is_local, local, 0), is_local)


def _row_sums(
    logits: torch.Tensor, targets: _Targets, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each row's largest logit m and, with z = (l - m) / T: sum exp(z), sum exp(z) z, z of target."""
    peak = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)

    for part in _chunks(logits):
        columns, is_local = targets.rows(part)
        peak[part] = logits[part].amax(-1)
        z = _scaled(logits[part], peak[part], temperature)

        sums[2, part] = z.gather(1, columns[:, None]).squeeze(1) * is_local
        weights = z.exp()
        sums[0, part] = weights.sum(-1)
        sums[1, part] = torch.linalg.vecdot(weights, z)
    return peak, sums


def _normalised(
    peak: torch.Tensor,
    sums: torch.Tensor,
    *,
    is_local: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log p(target), entropy, and T logsumexp(logits / T), over the columns of all ranks."""
    if group is not None and group.size() > 1:
        # Each rank's sums are relative to its local peak: convert them to the common peak before adding.
        common_peak = _reduce(peak.clone(), group, dist.ReduceOp.MAX)
        moved = (peak - common_peak) / temperature
        total, weighted, target = sums
        shrunk = moved.exp()
        sums = torch.stack([shrunk * total, shrunk * (weighted + moved * total), target + moved * is_local])
        peak, sums = common_peak, _reduce(sums, group, dist.ReduceOp.SUM)

    total, weighted, target = sums
    log_total = total.log()
    return target - log_total, log_total - weighted / total, peak + temperature * log_total


def _slopes(
    logits: torch.Tensor,
    targets: _Targets,
    *,
    shift: torch.Tensor,
    entropy: torch.Tensor,
    grads: Sequence[torch.Tensor],
    temperature: float,
) -> torch.Tensor:
    """Compute the gradient of the logits; grads: gradients of the logprobs and of the entropies."""
    grad_logp, grad_entropy = (grad / temperature for grad in grads)
    with_entropy = bool(grads[1].any())
    grad = torch.empty_like(logits)

    for part in _chunks(logits):
        columns, is_local = targets.rows(part)
        logp = _scaled(logits[part], shift[part], temperature)
        slope = grad_logp[part, None].neg()
        if with_entropy:
            slope = slope - (logp + entropy[part, None]) * grad_entropy[part, None]

        # In place, logp becomes p, and then p times the slope.
        chunk_grad = logp.exp_().mul_(slope)
        chunk_grad.scatter_add_(1, columns[:, None], (grad_logp[part] * is_local)[:, None])
        grad[part] = chunk_grad
    return grad


def _scaled(logits: torch.Tensor, shift: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute (logits - shift) / T in float32."""
    z = logits.float() - shift[:, None]
    return z if temperature == 1 else z.div_(temperature)


def _chunks(logits: torch.Tensor) -> list[slice]:
    """List slices of rows whose temporaries fit into the cache (on a GPU: into moderate memory)."""
    elements = CHUNK_ELEMENTS if logits.is_cuda else CACHE_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return [slice(i, i + rows) for i in range(0, logits.shape[0], rows)]


def _reduce(x: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce x in place over the ranks of a group, if there are several."""
    if group is not None and group.size() > 1 and x.numel():
        dist.all_reduce(x, op=op, group=group)
    return x
