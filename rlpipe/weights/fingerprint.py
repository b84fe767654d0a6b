"""Hashes of tensors by the algorithms of SGLang's weights checker, computed on the tensors' device.

On a CPU server the hash is SHA-256 (managers/mm_utils.py, `tensor_hash`). On a GPU server it is a 64-bit mix
(kernels/ops/memory/gpu_tensor_hash.py), computed with Triton if the tensors are on a GPU and with torch
otherwise. A tensor is given as the parts that it is fused from, in order; they are read one after the other.
SHA-256 needs no copy, and several tensors are hashed in parallel. The mix needs a copy only if a part ends
within a tile.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

Parts = Sequence[torch.Tensor]  # parts of one tensor, cut along its first dimension

TILE = 8192  # 32-bit words that the mix sums up before it mixes their sum
_CHUNK = 64 * TILE  # words mixed at once on a CPU: they fit in its cache
_SEED = 0x243F6A88
HALVES = (  # seed, factor of the position, rotation of the position
    (_SEED, 0x27D4EB2D, 15),
    (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 0x165667B1, 13),
)


def fingerprints(tensors: Mapping[str, Parts], *, on_gpu: bool) -> dict[str, str]:
    """Hash each tensor with the hash of the server's device; return 16 hexadecimal digits by name.

    If two names have the same parts, these are hashed once. For results on a GPU the host waits once.
    """
    # largest first, so that no thread has a large tensor at the end
    largest_first = sorted(tensors.values(), key=lambda parts: -sum(part.nbytes for part in parts))
    distinct = {id(parts): parts for parts in largest_first}

    if on_gpu:
        hashes = _mixes(list(distinct.values()))
    else:
        with ThreadPoolExecutor(min(len(distinct), _cores()) or 1) as pool:
            hashes = list(pool.map(cpu_hash, distinct.values()))  # hashlib releases the interpreter's lock

    by_parts = dict(zip(distinct, hashes, strict=True))
    return {name: f"{by_parts[id(parts)]:016x}" for name, parts in tensors.items()}


def cpu_hash(parts: Parts) -> int:
    """Compute SHA-256 of the bytes; return its first 8 bytes as a big-endian number."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_bytes(part.cpu()).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big")


def gpu_hash(parts: Parts) -> int:
    """Compute SGLang's mix: two 32-bit position-mixed sums per tile of 8192 words, added and mixed again."""
    return _mixes([parts])[0]


def mix(sums: Sequence[torch.Tensor]) -> list[str]:
    """Compute fingerprints of tensors. sums: for each tensor, the total of its `tile_sums`, [2] int64."""
    if not sums:
        return []
    return [f"{_splitmix64((high << 32) + low):016x}" for high, low in torch.stack(list(sums)).tolist()]


def ends_with_tiles(parts: Parts) -> bool:
    """Return whether every part ends at the end of a tile, so that parts can be added separately."""
    return not any(part.nbytes % (4 * TILE) for part in parts[:-1])


def tile_sums(parts: Parts, device: torch.device) -> torch.Tensor:
    """Add up the mixed sums of tiles over all parts that are not on the meta device: [2] int64.

    parts: all parts of one tensor; `ends_with_tiles` must be true.
    """
    num_words, first = -(-sum(part.nbytes for part in parts) // 4), 0
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        if not part.is_meta:
            _add_tiles(_words(_bytes(part)), first, num_words, sums)
        first += -(-part.nbytes // 4)
    return sums


def _mixes(tensors: Sequence[Parts]) -> list[int]:
    """Compute the mix of each tensor on its device; on a CPU with all cores instead of torch's threads."""
    on_cpu = all(part.device.type == "cpu" for parts in tensors for part in parts)
    with ThreadPoolExecutor(_cores() if on_cpu else 1) as pool:  # torch releases the interpreter's lock
        sums = list(pool.map(_sums, tensors))
    return [int(digits, 16) for digits in mix(sums)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _sums(parts: Parts) -> torch.Tensor:
    """Add up the mixed sums of all tiles: [2] int64, the two halves; 0 for an empty tensor, as in SGLang."""
    if not ends_with_tiles(parts):
        parts = [torch.cat([_bytes(part) for part in parts])]
    return tile_sums(parts, parts[0].device)


def _add_tiles(words: torch.Tensor, first: int, num_words: int, sums: torch.Tensor) -> None:
    """Add the mixed sums of `words`, [n] int32 from position `first` of a tensor of num_words, to `sums`."""
    if words.is_cuda:
        # imported here, because triton reads TRITON_INTERPRET at its import, and CPU runs do not need triton
        from rlpipe.weights.fingerprint_kernel import add_mixed

        add_mixed(words, first, num_words, sums)
        return
    for start in range(0, len(words), _CHUNK):
        sums += _mixed(words[start : start + _CHUNK], first + start, 4 * num_words)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as int32, padded with zeros; a view if length and address are multiples of 4."""
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    return (data.clone() if data.data_ptr() % 4 else data).view(torch.int32)


def _mixed(words: torch.Tensor, start: int, num_bytes: int) -> torch.Tensor:
    """Compute the contribution of some tiles to `_sums`, [2] int64. words: [n] int32 from position `start`.

    Arithmetic is modulo 2^32, as int32 overflows; after a shift to the right the sign bits must be cleared.
    """
    position = torch.arange(start, start + len(words), device=words.device).to(torch.int32)
    halves = []
    for seed, factor, rotation in HALVES:
        # mix each word with its position ...
        mixed = (position * _signed(factor)).add_(_signed(seed))
        mixed ^= (position << rotation) | _shifted(position, 32 - rotation)
        mixed = _fmix32_(mixed.bitwise_xor_(words))

        # ... and the sum of a tile with the size of the tensor
        mixed = torch.nn.functional.pad(mixed, (0, -len(words) % TILE)).view(-1, TILE)
        summed = mixed.sum(1, dtype=torch.int32).bitwise_xor_(_signed(num_bytes & 0xFFFFFFFF))
        halves.append((_fmix32_(summed).long() & 0xFFFFFFFF).sum())
    return torch.stack(halves)


def _fmix32_(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of MurmurHash3 to int32, in place."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(_signed(0x85EBCA6B))
    x.bitwise_xor_(_shifted(x, 13)).mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int32 to the right as unsigned."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word.

    >>> _signed(0xFFFFFFFF), _signed(1)
    (-1, 1)
    """
    return word - (1 << 32) if word >> 31 else word


def _splitmix64(x: int) -> int:
    """Apply the finalizer of SplitMix64."""
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as [n] uint8; copy it only if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
