"""Proof that a server holds what was sent: a fingerprint of every tensor of target and draft.

Syncing the target and forgetting the draft is silent: outputs stay right, acceptance falls to nothing.
SGLang's `/weights_checker` hashes each parameter where it lies, per rank and role. The same hashes are
computed here from the weights that were sent, fused and named as SGLang keeps them:

    q, k, v_proj -> qkv_proj;  gate, up_proj -> gate_up_proj;  mtp_layers.0 -> draft.model
    gate, up_proj of all experts -> w13_weight;  down_proj of all -> w2_weight

so a difference is a tensor that did not arrive. Names and layouts are those of the family's table
(`rlpipe/models`) and of the drafter's declaration, the hashes are `fingerprint.py`'s; the shapes that a rank
keeps are made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import Drafter
from rlpipe.models import family_of
from rlpipe.models.base import EMBEDDING, FINAL_NORM, HEAD, Layout, Part
from rlpipe.models.checkpoint import is_mtp_weight
from rlpipe.weights.fingerprint import Parts, fingerprints

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

    def rows(self, tensor: torch.Tensor, *, of_kv: bool = False) -> torch.Tensor:
        """Its rows of a tensor split by output. of_kv: whether they belong to key or value heads."""
        size, rank = self.size, self.rank
        if of_kv and self.kv_heads < size:
            rank, size = rank // (size // self.kv_heads), self.kv_heads
        return tensor.chunk(size)[rank]

    def pieces(self, tensors: Parts, layout: Layout) -> Parts:
        """What it keeps of each Hugging Face tensor of one weight."""
        if layout is Layout.QKV:
            return [self.rows(tensor, of_kv=place > 0) for place, tensor in enumerate(tensors)]
        if layout is Layout.GATE_UP:
            return [self.rows(tensor) for tensor in tensors]
        if layout is Layout.COLUMNS:
            return [tensor.chunk(self.size, dim=1)[self.rank] for tensor in tensors]
        if layout is Layout.VOCABULARY:
            return [self.rows(_padded(tensor)) for tensor in tensors]
        return tensors


def server_parts(
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    shard: Shard,
    hf_config: Mapping[str, Any],
    *,
    drafter: Drafter | None,
) -> dict[str, Parts]:
    """HF weights under the names and in the shapes of one rank's parameters, `draft.` before the draft's.

    Each tensor as the parts it is fused of along its first dimension, as far as they go without a copy.

    weights: all, or a bucket of them. hf_config: of the model; where its head is tied the server keeps none.
    drafter: what the server drafts with, if it does. Raises ValueError naming a tensor that no table maps,
    and one that its neighbours are fused with and that is not there.
    """
    found: dict[str, Parts] = {}
    kept = family_of(hf_config).float32
    unknown = {name for name in weights if is_served(name, drafter)}
    tied = bool(hf_config.get("tie_word_embeddings"))
    for served, prefix, part in _table(hf_config, drafter):
        names = [prefix + name for name in part.hf]
        present = unknown.intersection(names)
        unknown -= present
        if not present or (tied and served == HEAD.served_name):
            continue
        if missing := sorted(set(names) - present):
            raise ValueError(f"{served} is made of {names}, and {missing} are not sent: send them together.")
        types = [torch.float32 if name.endswith(kept) else dtype for name in names]
        sent = [weights[name].to(kind) for name, kind in zip(names, types, strict=True)]
        found[served] = shard.pieces(sent, part.layout)
    if unknown:
        raise ValueError(
            f"No table says where an SGLang server keeps {', '.join(sorted(unknown))}: add it to the "
            "family's table (rlpipe/models), or send the weights of this model only."
        )
    shared = drafter.kind.served.shared if drafter else ()
    names = [part.served_name for part in shared]
    return found | {DRAFT + name: found[name] for name in names if name in found}


def rank_fingerprints(
    weights: Mapping[str, torch.Tensor],
    rollout: RolloutConfig,
    hf_config: Mapping[str, Any],
    *,
    drafter: Drafter | None,
    on_gpu: bool,
) -> list[dict[str, str]]:
    """What each rank of a server must hold of these weights, as its device hashes it; see `server_parts`."""
    size, dtype = rollout.sglang.tp, getattr(torch, rollout.dtype)
    kv_heads = int(hf_config["num_key_value_heads"])
    shards = (Shard(rank=rank, size=size, kv_heads=kv_heads) for rank in range(size))
    parts = [server_parts(weights, dtype, shard, hf_config, drafter=drafter) for shard in shards]
    return [fingerprints(tensors, on_gpu) for tensors in parts]


def is_served(name: str, drafter: Drafter | None) -> bool:
    """Whether a server with this drafter keeps a weight up to date: of several MTP layers the first.

    >>> is_served("model.mtp_layers.0.norm.weight", Drafter.EAGLE3), is_served("eagle3.d2t", Drafter.EAGLE3)
    (False, False)
    """
    draft = drafter and drafter.kind.served
    if is_mtp_weight(name):
        return bool(draft) and name.startswith(draft.prefix)
    return not draft or name.removeprefix(draft.prefix) not in draft.fixed


def _table(hf_config: Mapping[str, Any], drafter: Drafter | None) -> Iterator[tuple[str, str, Part]]:
    """Name on the server, what stands before the Hugging Face names, and the weight, for each of a model."""
    family = family_of(hf_config)
    for part in (EMBEDDING, FINAL_NORM, HEAD):
        yield part.served_name, "", part
    layers = [f"model.layers.{index}." for index in range(int(hf_config["num_hidden_layers"]))]
    layer = _fused(family.layer_parts(hf_config))
    places = [(prefix, prefix, layer) for prefix in layers]
    if drafter:
        draft = drafter.kind.served
        for at, prefix, parts in draft.tables(family, hf_config):
            places.append((DRAFT + at, draft.prefix + prefix, _fused(parts)))
    for place, prefix, parts in places:
        for part in parts:
            yield place + part.served_name, prefix, part


def _fused(parts: Iterable[Part]) -> list[Part]:
    """The weights as a server keeps them: those of one name, the experts', are one, in their order."""
    found: dict[str, Part] = {}
    for part in parts:
        before = found.get(part.served_name)
        found[part.served_name] = replace(part, hf=before.hf + part.hf) if before else part
    return list(found.values())


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
