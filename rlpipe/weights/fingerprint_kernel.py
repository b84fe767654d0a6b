"""SGLang's 64-bit mix in Triton; `fingerprint.py` has it in torch, and imports this at its first use.

There is one program for each tile of 8192 words. It reads the tile once and adds the tile's two mixed sums to
the tensor's. The sums are integers, so the order of the programs does not matter. Results are read only after
the kernels of all tensors are launched. Works under TRITON_INTERPRET=1, which must be set before triton is
imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlpipe.weights.fingerprint import HALVES, TILE

BLOCK = 1024  # words of a tile that are read at once
(_SEED_HIGH, _FACTOR_HIGH, _ROTATION_HIGH), (_SEED_LOW, _FACTOR_LOW, _ROTATION_LOW) = (
    tuple(map(tl.constexpr, half)) for half in HALVES
)


def add_mixed(words: torch.Tensor, first: int, num_words: int, sums: torch.Tensor) -> None:
    """Add the contribution of `words` to a tensor's sums.

    words: [n] int32, from position `first` of the tensor, a multiple of TILE. num_words: size of the full
    tensor in words. sums: [2] int64 on the same device.
    """
    if not len(words):
        return

    with torch.cuda.device_of(words):
        mix_kernel[(triton.cdiv(len(words), TILE),)](
            words,
            sums,
            len(words),
            first,
            num_words,
            TILE=TILE,
            BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]: Triton makes a constexpr of it
        )


@triton.jit
def _fmix32(x):
    """Apply the finalizer of MurmurHash3. x: uint32."""
    x ^= x >> 16
    x *= tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= x >> 13
    x *= tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _mixed(word, position, SEED: tl.constexpr, FACTOR: tl.constexpr, ROTATION: tl.constexpr):
    """Mix words [BLOCK] uint32 with their positions."""
    key = position * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)
    return _fmix32(word ^ key ^ ((position << ROTATION) | (position >> (32 - ROTATION))))


@triton.jit
def mix_kernel(words, sums, count, first, num_words, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add the two mixed sums of one tile. words: [count] int32; sums: [2] int64."""
    start = tl.program_id(0).to(tl.int64) * TILE
    high = tl.zeros((BLOCK,), tl.uint32)
    low = tl.zeros((BLOCK,), tl.uint32)

    # The tile does not fit in a program's registers, so read it block by block.
    for offset in tl.static_range(0, TILE, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < count
        word = tl.load(words + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        position = (first + at).to(tl.uint32)
        high += tl.where(inside, _mixed(word, position, _SEED_HIGH, _FACTOR_HIGH, _ROTATION_HIGH), 0)
        low += tl.where(inside, _mixed(word, position, _SEED_LOW, _FACTOR_LOW, _ROTATION_LOW), 0)

    num_bytes = tl.full((), num_words, tl.uint32) * 4
    tl.atomic_add(sums, _fmix32(tl.sum(high, 0).to(tl.uint32) ^ num_bytes).to(tl.int64))
    tl.atomic_add(sums + 1, _fmix32(tl.sum(low, 0).to(tl.uint32) ^ num_bytes).to(tl.int64))
