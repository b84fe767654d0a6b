"""Proof that a server holds what was sent: a fingerprint of every tensor of target and draft.

Syncing the target and forgetting the draft is silent: outputs stay right, acceptance falls to nothing.
SGLang's `/weights_checker` hashes each parameter where it lies, per rank and role. The same hashes are
computed here from the weights that were sent, fused and named as SGLang keeps them:

    q, k, v_proj -> qkv_proj;  gate, up_proj -> gate_up_proj;  mtp_layers.0 -> draft.model

so a difference is a tensor that did not arrive. Owns names and shapes; the hashes are `fingerprint.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlpipe.models.checkpoint import MTP_PREFIX, is_mtp_weight
from rlpipe.weights.fingerprint import Parts

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


def server_parts(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype, shard: Shard, *, tied: bool, draft: bool
) -> dict[str, Parts]:
    """HF weights under the names and in the shapes of one rank's parameters, `draft.` before the draft's.

    Each tensor as the parts it is fused of along its first dimension, as far as they go without a copy.

    tied: the server keeps no lm_head of its own. draft: whether it drafts at all.
    """
    found: dict[str, Parts] = {}
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
            pieces = [shard.rows(one, part) for one, part in zip(tensors, parts, strict=True)]
            name = ".".join([*path, fused, kind])
        elif module in _SPLIT_BY_INPUT:
            pieces = [tensor.chunk(shard.size, dim=1)[shard.rank]]
        elif name in _VOCABULARY:
            pieces = [shard.rows(_padded(tensor), module)]
        else:
            pieces = [tensor]
        found[_server_name(name)] = pieces
    if draft:  # the draft reads the target's embedding and head
        found |= {DRAFT + name: found[name] for name in _VOCABULARY if name in found}
    return found


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """SGLang keeps a multiple of 64 rows of a vocabulary; those beyond it are zero."""
    missing = -len(tensor) % 64
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


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
