"""Row statistics and their gradient in Triton: fused kernels with the same functions as `torch_rows`.

One program per row; logits are read in tiles, without temporaries of size V. Bytes per row of bf16 logits:

    normalizers  reads z, y                       4 V      (one launch each, online softmax)
    overlaps     reads z, y, writes 1 bit         4.125 V  (all sums in one loop)
    gradient     reads z and the bits, writes dz  4.125 V  (the target only for KL terms)

Together they move 12.25 V, against 14 V when the gradient reads the target instead of the bits. Statistics
are float32; row offsets are int64 (N * K * V soon exceeds 2^31); masked rows of the gradient are 0 and read
no logits. Works under TRITON_INTERPRET=1, which must be set before triton is imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlpipe.drafts.loss.torch_rows import FLOOR, Sums

TILE = 2048
WARPS = 8
STAGES = 3  # tiles in flight; registers allow only two programs at a time
_FLOOR = tl.constexpr(FLOOR)
_LOWEST = tl.constexpr(-3.0e38)  # below any logit; finite, so that differences are never NaN


@triton.jit
def _row(pointer, depths, stride_n, stride_k):
    """Return the pointer to this program's row of [N, K, V] with any strides."""
    row = tl.program_id(0).to(tl.int64)
    return pointer + (row // depths) * stride_n + (row % depths) * stride_k


@triton.jit
def _normalizers(
    logits,
    largest,
    lse,
    depths,
    vocab,
    stride_n,
    stride_k,
    stride_v,
    temperature,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store the largest logit and the log-sum-exp of a row, in one pass (online softmax)."""
    start = _row(logits, depths, stride_n, stride_k)
    top = tl.full((), _LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)

    for first in tl.range(0, vocab, TILE, num_stages=STAGES):
        v = first + tl.arange(0, TILE)
        x = tl.load(start + v.to(tl.int64) * stride_v, mask=v < vocab, other=float("-inf"))
        x = x.to(tl.float32) / temperature

        # The sum refers to the largest logit so far: rescale it when that grows.
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher

    row = tl.program_id(0)
    tl.store(largest + row, top)
    tl.store(lse + row, top + tl.log(total))


@triton.jit
def _overlaps(
    draft, target, z_largest, y_largest, z_lse, y_lse, sums, bits, rows, depths, vocab, octets,
    z_stride_n, z_stride_k, z_stride_v, y_stride_n, y_stride_k, y_stride_v, temperature,
    KEEP_BITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the `Sums` of a row and, on request, the bits 1[q <= p]."""
    row = tl.program_id(0).to(tl.int64)
    z_start = _row(draft, depths, z_stride_n, z_stride_k)
    y_start = _row(target, depths, y_stride_n, y_stride_k)
    z_top, y_top = tl.load(z_largest + row), tl.load(y_largest + row)
    z_log, y_log = tl.load(z_lse + row), tl.load(y_lse + row)

    # One partial sum per position in the tile, added up after the loop.
    covered = tl.zeros((TILE,), tl.float32)
    below = tl.zeros((TILE,), tl.float32)
    above = tl.zeros((TILE,), tl.float32)
    kl = tl.zeros((TILE,), tl.float32)
    reverse_kl = tl.zeros((TILE,), tl.float32)
    z_entropy = tl.zeros((TILE,), tl.float32)
    y_entropy = tl.zeros((TILE,), tl.float32)
    shared_top = tl.zeros((TILE,), tl.float32)

    for first in tl.range(0, vocab, TILE, num_stages=STAGES):
        v = first + tl.arange(0, TILE)
        inside = v < vocab
        z = tl.load(z_start + v.to(tl.int64) * z_stride_v, mask=inside, other=float("-inf"))
        y = tl.load(y_start + v.to(tl.int64) * y_stride_v, mask=inside, other=float("-inf"))
        z, y = z.to(tl.float32) / temperature, y.to(tl.float32) / temperature
        log_q, log_p = tl.maximum(z - z_log, _FLOOR), tl.maximum(y - y_log, _FLOOR)
        q, p = tl.exp(log_q), tl.exp(log_p)

        # Columns beyond the vocabulary have q = p = 0 and add 0 to every sum.
        under = log_q <= log_p
        covered += tl.where(under, q, 0.0)
        below += tl.where(under, 0.0, p)
        above += tl.where(log_p > log_q, p, 0.0)
        kl += p * (log_p - log_q)
        reverse_kl += q * (log_q - log_p)
        z_entropy -= q * log_q
        y_entropy -= p * log_p
        shared_top += tl.where((z == z_top) & (y == y_top) & inside, 1.0, 0.0)

        # Token v is bit v % 8 of byte v // 8.
        if KEEP_BITS:
            places = tl.arange(0, 8)[None, :]
            octet = tl.sum(tl.reshape(under.to(tl.int32), (TILE // 8, 8)) << places, 1)
            o = first // 8 + tl.arange(0, TILE // 8)
            tl.store(bits + row * octets + o, octet.to(tl.uint8), mask=o < octets)

    # In the order of `Sums`. min(p, q) is q where q <= p, else p.
    overlap = tl.sum(covered, 0)
    tl.store(sums + 0 * rows + row, overlap + tl.sum(below, 0))
    tl.store(sums + 1 * rows + row, overlap)
    tl.store(sums + 2 * rows + row, tl.sum(kl, 0))
    tl.store(sums + 3 * rows + row, tl.sum(reverse_kl, 0))
    tl.store(sums + 4 * rows + row, tl.sum(z_entropy, 0))
    tl.store(sums + 5 * rows + row, tl.sum(y_entropy, 0))
    tl.store(sums + 6 * rows + row, tl.sum(above, 0))
    tl.store(sums + 7 * rows + row, tl.sum(shared_top, 0))


@triton.jit
def _gradient(
    draft, target, bits, grad, active, z_lse, y_lse, covered, reverse_kl, tokens,
    by_alpha, by_kl, by_reverse, by_logprob, depths, vocab, octets,
    z_stride_n, z_stride_k, z_stride_v, y_stride_n, y_stride_k, y_stride_v, temperature,
    USE_TARGET: tl.constexpr, USE_TOKENS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a row's draft logits; 0 where the row is masked."""
    row = tl.program_id(0).to(tl.int64)
    z_start = _row(draft, depths, z_stride_n, z_stride_k)
    y_start = _row(target, depths, y_stride_n, y_stride_k)
    kept = tl.load(active + row) != 0

    # Load the row's statistics and the derivatives of the loss with respect to them.
    log_z, s = tl.load(z_lse + row), tl.load(covered + row)
    c_alpha, c_logprob = tl.load(by_alpha + row), tl.load(by_logprob + row)
    c_kl, c_reverse = tl.load(by_kl + row), tl.load(by_reverse + row)
    log_y = tl.load(y_lse + row)
    divergence = tl.load(reverse_kl + row)

    for first in range(0, vocab, TILE):
        v = first + tl.arange(0, TILE)
        read = (v < vocab) & kept
        z = tl.load(z_start + v.to(tl.int64) * z_stride_v, mask=read, other=float("-inf"))
        log_q = tl.maximum(z.to(tl.float32) / temperature - log_z, _FLOOR)
        q = tl.exp(log_q)

        # Only KL terms need the target's logits; the bits are enough for alpha.
        if USE_TARGET:
            y = tl.load(y_start + v.to(tl.int64) * y_stride_v, mask=read, other=float("-inf"))
            log_p = tl.maximum(y.to(tl.float32) / temperature - log_y, _FLOOR)
            under = (log_q <= log_p).to(tl.float32)
            factor = c_reverse * (log_q - log_p - divergence) + c_kl
            d = q * (c_alpha * (under - s) + factor - c_logprob) - c_kl * tl.exp(log_p)
        else:
            octet = tl.load(bits + row * octets + v // 8, mask=read, other=0).to(tl.int32)
            under = ((octet >> (v % 8)) & 1).to(tl.float32)
            d = q * (c_alpha * (under - s) - c_logprob)

        if USE_TOKENS:
            d += tl.where(v == tl.load(tokens + row), c_logprob, 0.0)
        d = tl.where(read, d / temperature, 0.0)
        tl.store(grad + row * vocab + v, d.to(grad.dtype.element_ty), mask=v < vocab)


def normalizers(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute `torch_rows.normalizers` with Triton: [N, K, V] -> two tensors [N, K], float32."""
    largest = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(largest)

    # Without rows there is no launch.
    if largest.numel():
        depths, vocab = logits.shape[1:]
        _normalizers[(largest.numel(),)](
            logits,
            largest,
            lse,
            depths,
            vocab,
            *logits.stride(),
            temperature,
            TILE=TILE,
            STAGES=STAGES,
            num_warps=WARPS,
        )
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
    """Compute `torch_rows.overlaps` with Triton: [N, K, V] -> [len(Sums), N, K] float32, and the bits."""
    anchors, depths, vocab = draft.shape
    octets = (vocab + 7) // 8
    sums = torch.empty(len(Sums), anchors, depths, dtype=torch.float32, device=draft.device)

    bits = None
    if keep_bits:
        bits = torch.empty(anchors, depths, octets, dtype=torch.uint8, device=draft.device)

    # A kernel cannot take None: without bits, pass a pointer that it does not use.
    if sums.numel():
        _overlaps[(anchors * depths,)](
            draft, target, *_flat(*largest), *_flat(*lse), sums, sums if bits is None else bits,
            anchors * depths, depths, vocab, octets, *draft.stride(), *target.stride(), temperature,
            KEEP_BITS=keep_bits, TILE=TILE, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
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
    """Compute `torch_rows.gradient` with Triton: [N, K, V], in the dtype of the draft's logits."""
    anchors, depths, vocab = draft.shape
    out = torch.empty(draft.shape, dtype=draft.dtype, device=draft.device)
    if not out.numel():
        return out

    # A kernel cannot take None: for absent arguments, pass pointers that it does not use.
    other, other_lse = (draft, lse) if target is None else (target, target_lse)
    coefficients = coefficients.float().contiguous()
    lse, other_lse, active = _flat(lse, other_lse, mask.to(torch.uint8))
    _gradient[(anchors * depths,)](
        draft, other, out if bits is None else bits, out, active, lse, other_lse,
        *_flat(sums[Sums.COVERED], sums[Sums.REVERSE_KL]), lse if tokens is None else tokens.contiguous(),
        *coefficients.unbind(0), depths, vocab, (vocab + 7) // 8, *draft.stride(), *other.stride(),
        temperature, USE_TARGET=target is not None, USE_TOKENS=tokens is not None, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return out


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Make the tensors contiguous, as the kernels need them."""
    return [tensor.contiguous() for tensor in tensors]
