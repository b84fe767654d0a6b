"""Log-probabilities and entropy of a softmax whose vocabulary is cut over tensor parallel ranks.

Owns the math and its gradient, and the logprobs of further tokens of the same rows. From logits, an autograd
function keeps these alone for the backward pass (no [N, V] softmax is stored), and works in row chunks. From
hidden states (`Head`) logits exist for a chunk of rows at a time, and are computed again backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

HEAD_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # of logits that exist at once
HEAD_BLOCK = 1 << 14  # rows of the head whose gradient is added at once
CHUNK_ELEMENTS = 1 << 24
CACHE_ELEMENTS = 1 << 17  # of a CPU's second-level cache


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy H(p) of p = softmax(logits / temperature), in nats, differentiable.

    logits: [N, V_local], this rank's columns, starting at token id vocab_start. targets: [N] int64,
    global token ids. Returns two [N] float32.

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
    targets: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """log p of further tokens of rows whose `targets` are scored: [N, K] float32, no gradient.

        log p_i = log p_y + (logit_i - logit_y) / T          y: the target

    So no second pass is made over the vocabulary, and ranks exchange [N, K + 1] numbers once.
    logits, targets, temperature, vocab_start: as given to `token_logprobs`, which returned logprobs [N].
    ids: [N, K] int64, global token ids; -1 is padding and gives -inf.

    >>> logits, ids = torch.tensor([[0.0, 0.0, 0.0, 9.0]]), torch.tensor([[3, 1, -1]])
    >>> logp, _ = token_logprobs(logits, torch.tensor([3]))
    >>> candidate_logprobs(logits, ids, torch.tensor([3]), logp).round(decimals=2)
    tensor([[-0., -9., -inf]])
    """
    local = torch.cat([ids, targets[:, None]], 1) - vocab_start
    mine = (local >= 0) & (local < logits.shape[1])
    chosen = logits.gather(1, torch.where(mine, local, 0)).float() * mine
    chosen = _reduce(chosen, group, dist.ReduceOp.SUM)
    own = logprobs[:, None] + (chosen[:, :-1] - chosen[:, -1:]) / temperature
    return own.masked_fill(ids < 0, -torch.inf)


@dataclass(slots=True, kw_only=True)
class Head:
    """The output layer on hidden states [N, H], whose logits [N, V_local] never exist at once.

    weight: this rank's shard, of one size on all ranks of the group; its first `columns` rows are tokens,
    from id vocab_start on. Hidden states are whole and equal on all ranks, and so is their gradient. Logits
    that fit into HEAD_BYTES are kept for it, others are computed again.
    """

    weight: torch.Tensor
    columns: int
    temperature: float = 1.0
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None

    def logprobs(self, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_logprobs` of the logits of hidden states."""
        return _HeadLogprobs.apply(states, self.weight[: self.columns], targets, self)

    @torch.no_grad()
    def candidates(
        self, states: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor, logprobs: torch.Tensor
    ) -> torch.Tensor:
        """`candidate_logprobs` of the logits of hidden states."""
        found = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
        for part in self.parts(states):
            found[part] = candidate_logprobs(
                states[part] @ self.weight[: self.columns].t(),
                ids[part],
                targets[part],
                logprobs[part],
                temperature=self.temperature,
                vocab_start=self.vocab_start,
                group=self.group,
            )
        return found

    def parts(self, states: torch.Tensor) -> Iterator[slice]:
        """Rows whose logits exist together; the same on all ranks."""
        row = self.weight.shape[0] * states.element_size()
        rows = max(1, HEAD_BYTES[states.device.type] // row)
        return (slice(i, i + rows) for i in range(0, len(states), rows))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group):
        local, mine = _local(targets, vocab_start, logits.shape[1])
        found = _row_sums(logits, local, mine, temperature)
        logp, entropy, shift = _normalised(*found, mine, temperature, group)
        ctx.save_for_backward(logits, local, mine, shift, entropy)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        logits, *rows = ctx.saved_tensors
        return _slopes(logits, *rows, *grads, ctx.temperature), None, None, None, None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, targets, head):
        local, mine = _local(targets, head.vocab_start, len(weight))
        parts = list(head.parts(states))
        peak = torch.empty(len(states), dtype=torch.float32, device=states.device)
        sums = torch.empty(3, len(states), dtype=torch.float32, device=states.device)
        logits = None
        for part in parts:
            logits = states[part] @ weight.t()
            peak[part], sums[:, part] = _row_sums(logits, local[part], mine[part], head.temperature)
        logp, entropy, shift = _normalised(peak, sums, mine, head.temperature, head.group)
        kept = logits if len(parts) == 1 else None
        ctx.save_for_backward(states, weight, local, mine, shift, entropy, kept)
        ctx.head, ctx.parts = head, parts
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        states, weight, *rows, kept = ctx.saved_tensors
        grad_states, grad_weight = torch.empty_like(states), None
        if ctx.needs_input_grad[1]:  # a sum of many products: in float32
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in ctx.parts:
            logits = states[part] @ weight.t() if kept is None else kept
            here = [x[part] for x in (*rows, *grads)]
            slopes = _slopes(logits, *here, ctx.head.temperature)
            grad_states[part] = slopes @ weight
            for start in range(0, len(weight) if grad_weight is not None else 0, HEAD_BLOCK):
                block = slice(start, start + HEAD_BLOCK)
                grad_weight[block] += slopes[:, block].t() @ states[part]
        _reduce(grad_states, ctx.head.group, dist.ReduceOp.SUM)
        return grad_states, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _local(targets: torch.Tensor, start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the targets on this rank (0 if they are on another), and whether they are here."""
    local = targets - start
    mine = (local >= 0) & (local < columns)
    return torch.where(mine, local, 0), mine


def _row_sums(
    logits: torch.Tensor, local: torch.Tensor, mine: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit m of each row and, with z = (l - m) / T: sum exp(z), sum exp(z) z, target's z."""
    peak = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    for part in _chunks(logits):
        peak[part] = logits[part].amax(-1)
        z = _scaled(logits[part], peak[part], temperature)
        sums[2, part] = z.gather(1, local[part, None]).squeeze(1) * mine[part]
        weights = z.exp()
        sums[0, part] = weights.sum(-1)
        sums[1, part] = torch.linalg.vecdot(weights, z)
    return peak, sums


def _normalised(
    peak: torch.Tensor,
    sums: torch.Tensor,
    mine: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log p(target), entropy, and T logsumexp(logits / T), over the columns of all ranks."""
    if group is not None and group.size() > 1:
        whole = _reduce(peak.clone(), group, dist.ReduceOp.MAX)
        moved = (peak - whole) / temperature
        total, weighted, target = sums
        shrunk = moved.exp()
        sums = torch.stack([shrunk * total, shrunk * (weighted + moved * total), target + moved * mine])
        peak, sums = whole, _reduce(sums, group, dist.ReduceOp.SUM)
    total, weighted, target = sums
    log_total = total.log()
    return target - log_total, log_total - weighted / total, peak + temperature * log_total


def _slopes(
    logits: torch.Tensor,
    local: torch.Tensor,
    mine: torch.Tensor,
    shift: torch.Tensor,
    entropy: torch.Tensor,
    grad_logp: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Gradient of the logits."""
    with_entropy = bool(grad_entropy.any())
    grad_logp, grad_entropy = grad_logp / temperature, grad_entropy / temperature
    grad = torch.empty_like(logits)
    for part in _chunks(logits):
        logp = _scaled(logits[part], shift[part], temperature)
        slope = grad_logp[part, None].neg()
        if with_entropy:
            slope = slope - (logp + entropy[part, None]) * grad_entropy[part, None]
        own = logp.exp_().mul_(slope)
        own.scatter_add_(1, local[part, None], (grad_logp[part] * mine[part])[:, None])
        grad[part] = own
    return grad


def _scaled(logits: torch.Tensor, shift: torch.Tensor, temperature: float) -> torch.Tensor:
    """(logits - shift) / T in float32."""
    z = logits.float() - shift[:, None]
    return z if temperature == 1 else z.div_(temperature)


def _chunks(logits: torch.Tensor) -> list[slice]:
    elements = CHUNK_ELEMENTS if logits.is_cuda else CACHE_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return [slice(i, i + rows) for i in range(0, logits.shape[0], rows)]


def _reduce(x: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp) -> torch.Tensor:
    if group is not None and group.size() > 1 and x.numel():
        dist.all_reduce(x, op=op, group=group)
    return x
