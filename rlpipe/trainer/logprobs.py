"""Log-probabilities and entropy of a softmax whose vocabulary is cut over tensor parallel ranks.

Owns the math and its gradient, and the logprobs of further tokens of the same rows. One custom autograd
function keeps the logits alone for the backward pass (no [N, V] softmax is stored), and works in row chunks,
so peak memory beyond the logits and their gradient is one chunk.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

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


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, group):
        rows = logits.shape[0]
        local = targets - vocab_start
        mine = (local >= 0) & (local < logits.shape[1])
        local = torch.where(mine, local, 0)
        peak = torch.empty(rows, dtype=torch.float32, device=logits.device)
        for part in _chunks(logits):
            peak[part] = logits[part].amax(-1)
        peak = _reduce(peak, group, dist.ReduceOp.MAX)
        # rows of: sum exp(z), sum exp(z) z, z of the target; z = (logit - peak) / T
        sums = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
        for part in _chunks(logits):
            z = _scaled(logits[part], peak[part], temperature)
            sums[2, part] = z.gather(1, local[part, None]).squeeze(1) * mine[part]
            weights = z.exp()
            sums[0, part] = weights.sum(-1)
            sums[1, part] = torch.linalg.vecdot(weights, z)
        total, weighted, target = _reduce(sums, group, dist.ReduceOp.SUM)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, mine, peak + temperature * log_total, entropy)
        ctx.temperature = temperature
        return target - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        logits, local, mine, shift, entropy = ctx.saved_tensors
        with_entropy = bool(grad_entropy.any())
        grad_logp, grad_entropy = grad_logp / ctx.temperature, grad_entropy / ctx.temperature
        grad = torch.empty_like(logits)
        for part in _chunks(logits):
            logp = _scaled(logits[part], shift[part], ctx.temperature)
            slope = grad_logp[part, None].neg()
            if with_entropy:
                slope = slope - (logp + entropy[part, None]) * grad_entropy[part, None]
            own = logp.exp_().mul_(slope)
            own.scatter_add_(1, local[part, None], (grad_logp[part] * mine[part])[:, None])
            grad[part] = own
        return grad, None, None, None, None


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
