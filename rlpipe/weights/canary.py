"""Proof that a server holds what was sent: a fingerprint of every tensor of target and draft.

Syncing the target and forgetting the draft is silent: outputs stay right, acceptance falls to nothing.
SGLang's `/weights_checker` hashes each parameter where it lies, per rank and role. The same hashes are
computed here from the weights that were sent, fused and named as SGLang keeps them:

    q, k, v_proj -> qkv_proj;  gate, up_proj -> gate_up_proj;  mtp_layers.0 -> draft.model

so a difference is a tensor that did not arrive. Hashes: SHA-256 of the bytes on a CPU, SGLang's own
64-bit mix (kernels/ops/memory/gpu_tensor_hash.py) on a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rlpipe.models.checkpoint import MTP_PREFIX, is_mtp_weight

_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_FOLLOWS = ("k_proj", "v_proj", "up_proj")  # parts of a fused tensor that are not its first
_MTP_ROOT = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_SPLIT_BY_INPUT = ("o_proj", "down_proj")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
DRAFT = "draft."


@dataclass(slots=True, kw_only=True)
class CanaryReport:
    """What a check found: names of tensors that differ, by role."""

    target: list[str] = field(default_factory=list)
    draft: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the server holds exactly what was sent."""
        return not (self.target or self.draft)

    def summary(self) -> str:
        """One line for people."""
        if self.passed:
            return "target and draft are as sent"
        parts = [(n, names) for n, names in (("target", self.target), ("draft", self.draft)) if names]
        return "; ".join(f"{len(names)} of the {role} (first {names[0]})" for role, names in parts)


@dataclass(slots=True, kw_only=True)
class Shard:
    """Which part of each tensor a rank keeps. kv_heads: of the model; fewer than ranks are repeated."""

    rank: int = 0
    size: int = 1
    kv_heads: int = 1

    def rows(self, tensor: torch.Tensor, module: str) -> torch.Tensor:
        """Its rows of a tensor split by output."""
        size, rank = self.size, self.rank
        if module in ("k_proj", "v_proj") and self.kv_heads < size:
            rank, size = rank // (size // self.kv_heads), self.kv_heads
        return tensor.chunk(size)[rank]


def server_tensors(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype, shard: Shard, *, tied: bool, draft: bool
) -> dict[str, torch.Tensor]:
    """HF weights under the names and in the shapes of one rank's parameters, `draft.` before the draft's.

    tied: the server keeps no lm_head of its own. draft: whether it drafts at all.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if (is_mtp_weight(name) and not draft) or (tied and name == "lm_head.weight"):
            continue
        *path, module, kind = name.split(".")
        if module in _FOLLOWS:
            continue
        tensor = tensor.to(dtype)
        if module in _FUSED:
            fused, parts = _FUSED[module]
            tensors = [weights[".".join([*path, part, kind])].to(dtype) for part in parts]
            tensor = torch.cat([shard.rows(one, part) for one, part in zip(tensors, parts, strict=True)])
            name = ".".join([*path, fused, kind])
        elif module in _SPLIT_BY_INPUT:
            tensor = tensor.chunk(shard.size, dim=1)[shard.rank]
        elif name in _VOCABULARY:
            tensor = shard.rows(_padded(tensor), module)
        found[_server_name(name)] = tensor
    if draft:  # the draft reads the target's embedding and head
        found |= {DRAFT + name: found[name] for name in _VOCABULARY if name in found}
    return found


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """SGLang keeps a multiple of 64 rows of a vocabulary; those beyond it are zero."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % 64))


def fingerprints(tensors: Mapping[str, torch.Tensor], on_gpu: bool) -> dict[str, str]:
    """Hash of each tensor as the server's device hashes it, 16 hexadecimal digits."""
    function: Callable[[np.ndarray], int] = gpu_hash if on_gpu else cpu_hash
    return {name: f"{function(_bytes(tensor)):016x}" for name, tensor in tensors.items()}


def compare(expected: Mapping[str, str], served: Mapping[str, str]) -> CanaryReport:
    """Set one rank's checksums against `fingerprints`; a parameter on one side only counts as different.

    >>> compare({"a": "0", "draft.b": "1"}, {"a": "0", "draft.b": "2"}).draft
    ['draft.b']
    """
    report = CanaryReport()
    for name in sorted(served.keys() | expected.keys()):
        if served.get(name) != expected.get(name):
            bad = report.draft if name.startswith(DRAFT) else report.target
            bad.append(name)
    return report


def cpu_hash(data: np.ndarray) -> int:
    """First 8 bytes of SHA-256, big-endian."""
    return int.from_bytes(hashlib.sha256(data.data).digest()[:8], "big")


def gpu_hash(data: np.ndarray) -> int:
    """SGLang's GPU hash: two 32-bit position-mixed sums per tile of 8192 words, added and mixed."""
    words = np.frombuffer(data.tobytes() + bytes(-data.nbytes % 4), np.uint32)
    if not len(words):
        return 0
    seed, tile = 0x243F6A88, 8192
    seeds = (seed, ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
    total = 0
    size = np.uint32((len(words) * 4) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), tile):
            place = np.arange(start, min(start + tile, len(words)), dtype=np.uint32)
            value = words[start : start + tile]
            halves = []
            for seed_word, factor, turn in zip(seeds, (0x27D4EB2D, 0x165667B1), (15, 13), strict=True):
                mixed = place * np.uint32(factor) + np.uint32(seed_word)
                mixed ^= (place << np.uint32(turn)) | (place >> np.uint32(32 - turn))
                summed = _fmix32(value ^ mixed).sum(dtype=np.uint32) ^ size
                halves.append(int(_fmix32(np.asarray([summed], np.uint32))[0]))
            total += (halves[0] << 32) | halves[1]
    return _splitmix64(total)


def _fmix32(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3, on uint32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _server_name(name: str) -> str:
    """Where SGLang keeps an HF weight.

    >>> _server_name("model.mtp_layers.0.mlp.down_proj.weight"), _server_name("model.norm.weight")
    ('draft.model.mtp_block.mlp.down_proj.weight', 'model.norm.weight')
    """
    if not name.startswith(MTP_PREFIX):
        return name
    rest = name.removeprefix(MTP_PREFIX)
    inside = "" if rest.split(".")[0] in _MTP_ROOT else "mtp_block."
    return f"{DRAFT}model.{inside}{rest}"
