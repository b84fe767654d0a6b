"""Row statistics of draft and target logits, and their gradient, in torch: the reference backend.

Owns the three passes over the vocabulary; knows no loss and no process group. A row is one (anchor, depth).
Define log q = z / T - lse(z / T), and log p likewise; ties q = p count as q < p everywhere:

    alpha   = sum_v min(p, q)                       d alpha  / dz = q (1[q <= p] - S)
    S       = sum_v q 1[q <= p]
    KL(p|q) = sum_v p (log p - log q)               d KL     / dz = q - p
    KL(q|p) = sum_v q (log q - log p)               d KL     / dz = q (log q - log p - KL(q|p))
    log q(x)                                        d log q  / dz = 1[x] - q

Source: Bebop Eq. 10, 11, 17 and App. A-C. Anchors are processed in chunks, so that temporaries stay below a
few times `CHUNK_BYTES` for any N. Statistics are float32 (float64 for float64 logits). Log-probabilities are
floored at -1e4: -inf vocabulary padding is then an ordinary token of mass 0, and a KL against an impossible
token is large instead of infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor

CHUNK_BYTES = 2**22
FLOOR = -1e4
LOWEST = -1e30  # instead of -inf before a shard's softmax


class Sums(IntEnum):
    """First index of the [len(Sums), N, K] sums over the vocabulary (or over a shard of it)."""

    ALPHA = 0
    COVERED = 1  # S: draft mass where q <= p
    KL = 2  # KL(target || draft)
    REVERSE_KL = 3
    DRAFT_ENTROPY = 4
    TARGET_ENTROPY = 5
    TARGET_ABOVE = 6  # target mass where p > q
    TOP1 = 7  # > 0 when draft and target share a most likely token


class Coefficients(IntEnum):
    """First index of the [len(Coefficients), N, K] derivatives of the loss by each statistic."""

    ALPHA = 0
    KL = 1
    REVERSE_KL = 2
    DRAFT_LOGPROB = 3


def normalizers(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the largest logit and the log-sum-exp, both of logits / temperature: [N, K, V] -> [N, K]."""
    largest = torch.empty(logits.shape[:2], dtype=compute_dtype(logits), device=logits.device)
    lse = torch.empty_like(largest)
    for part in _chunks(logits):
        scaled = _scaled(logits[part], temperature).clamp(min=LOWEST)
        probs = scaled.softmax(-1)
        largest[part], lse[part] = scaled.amax(-1), _lse(scaled, probs) + probs.sum(-1).log()
    return largest, lse


def overlaps(
    draft: Tensor,
    target: Tensor,
    largest: tuple[Tensor, Tensor],
    lse: tuple[Tensor, Tensor],
    temperature: float,
    *,
    keep_bits: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sum over the vocabulary, and store 1[q <= p] as bits.

    draft, target: [N, K, V]. largest, lse: `normalizers` of draft and of target, each [N, K].
    Returns [len(Sums), N, K] and, with keep_bits, [N, K, ceil(V / 8)] uint8: token v in bit v % 8 of byte
    v // 8.
    """
    dtype = compute_dtype(draft)
    sums = torch.empty(len(Sums), *draft.shape[:2], dtype=dtype, device=draft.device)
    width = (draft.shape[2] + 7) // 8
    bits = draft.new_empty(*draft.shape[:2], width, dtype=torch.uint8) if keep_bits else None
    for part in _chunks(draft):
        z, y = _scaled(draft[part], temperature), _scaled(target[part], temperature)
        log_q, log_p = _log_probs(z, lse[0][part]), _log_probs(y, lse[1][part])
        q, p, gap = _probs(log_q), _probs(log_p), log_p - log_q

        sums[Sums.DRAFT_ENTROPY, part] = -_dot(q, log_q)
        sums[Sums.TARGET_ENTROPY, part] = -_dot(p, log_p)
        sums[Sums.KL, part] = _dot(p, gap)
        sums[Sums.REVERSE_KL, part] = -_dot(q, gap)
        sums[Sums.ALPHA, part] = torch.minimum(p, q).sum(-1)

        # From here on log_q, gap and log_p are reused as buffers: allocation would cost more than the
        # arithmetic.
        sums[Sums.TARGET_ABOVE, part] = _dot(p, torch.gt(gap, 0, out=log_q))
        covered = gap.ge_(0)
        sums[Sums.COVERED, part] = _dot(q, covered)

        z_top = torch.eq(z, largest[0][part][..., None], out=log_q)
        y_top = torch.eq(y, largest[1][part][..., None], out=log_p)
        sums[Sums.TOP1, part] = _dot(z_top, y_top)

        if bits is not None:
            bits[part] = _pack(covered)
    return sums, bits


def gradient(
    draft: Tensor,
    lse: Tensor,
    sums: Tensor,
    coefficients: Tensor,
    mask: Tensor,
    temperature: float,
    *,
    tokens: Tensor | None,
    bits: Tensor | None,
    target: Tensor | None = None,
    target_lse: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the draft's logits: [N, K, V] in their dtype, exact zeros in masked rows.

    sums: [len(Sums), N, K] over the full vocabulary. coefficients: [len(Coefficients), N, K]. tokens: [N, K]
    int64 in this shard's numbering (an id outside [0, V) belongs to another shard); None if the loss does not
    use log q(x). Pass either bits, from `overlaps`, or target with its lse; KL terms need the target.
    """
    assert bits is not None or (target is not None and target_lse is not None)
    out = torch.empty(draft.shape, dtype=draft.dtype, device=draft.device)
    if target is not None:
        use_kl, use_reverse = (
            coefficients[[Coefficients.KL, Coefficients.REVERSE_KL]].flatten(1).any(1).tolist()
        )

    for part in _chunks(draft):
        by_alpha, by_kl, by_reverse, by_logprob = coefficients[:, part, :, None].unbind(0)
        log_q = _log_probs(_scaled(draft[part], temperature), lse[part])
        factor = by_kl - by_logprob - by_alpha * sums[Sums.COVERED, part][..., None]
        q = _probs(log_q)

        # All terms except log q(x): d/dz of the sum of statistics, each times its coefficient.
        if target is None or target_lse is None:
            assert bits is not None
            grad = _unpack(bits[part], q).mul_(by_alpha).add_(factor).mul_(q)
        else:
            log_p = _log_probs(_scaled(target[part], temperature), target_lse[part])
            gap = log_q.sub_(log_p)
            grad = torch.le(gap, 0, out=torch.empty_like(gap)).mul_(by_alpha).add_(factor)
            if use_reverse:
                grad += gap.sub_(sums[Sums.REVERSE_KL, part][..., None]).mul_(by_reverse)
            grad.mul_(q)
            if use_kl:
                grad -= _probs(log_p).mul_(by_kl)

        if tokens is not None:
            local = tokens[part][..., None]
            here = (local >= 0) & (local < draft.shape[2])
            grad.scatter_add_(-1, local.where(here, 0), by_logprob * here)

        if temperature != 1.0:
            grad.div_(temperature)
        out[part] = grad.masked_fill_(~mask[part][..., None], 0)
    return out


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Cut the anchors into slices whose float32 logits fill `CHUNK_BYTES`, at least one anchor each."""
    anchors, depths, vocab = logits.shape
    step = max(1, CHUNK_BYTES // max(1, 4 * depths * vocab))
    return (slice(start, start + step) for start in range(0, anchors, step))


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(compute_dtype(logits))
    return logits if temperature == 1.0 else logits / temperature


def _lse(scaled: Tensor, probs: Tensor) -> Tensor:
    """Compute a softmax's log-sum-exp from its largest entry, which is exp(max - lse), without a pass of exp.

    The softmax's divisor is a plain float32 running sum: with 150,000 equal logits its relative error is
    1e-3. The probabilities sum to 1 with the same relative error, and `normalizers` corrects for it.
    """
    return scaled.amax(-1) - probs.amax(-1).log()


def _log_probs(scaled: Tensor, lse: Tensor) -> Tensor:
    return (scaled - lse[..., None]).clamp_(min=FLOOR)


def _probs(log_probs: Tensor) -> Tensor:
    """Compute exp as softmax times the shard's share of the mass, which is several times faster."""
    probs = log_probs.softmax(-1)
    return probs.mul_(_lse(log_probs, probs).exp_()[..., None])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


def _pack(ones: Tensor) -> Tensor:
    """Pack zeros and ones [..., V] into bits: [..., ceil(V / 8)] uint8."""
    octets = torch.nn.functional.pad(ones, (0, -ones.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (octets @ 2 ** torch.arange(8, device=ones.device).to(ones.dtype)).to(torch.uint8)


def _unpack(packed: Tensor, like: Tensor) -> Tensor:
    """Unpack bits [..., ceil(V / 8)] into zeros and ones of the shape and dtype of `like`, [..., V]."""
    table = torch.arange(256, device=packed.device)[:, None] >> torch.arange(8, device=packed.device) & 1
    octets = torch.nn.functional.embedding(packed.int(), table.to(like.dtype))
    return octets.flatten(-2)[..., : like.shape[-1]]
