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

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.models import family_of, read_architecture
from rlpipe.models.base import EMBEDDING, FINAL_NORM, HEAD, Layout, Part
from rlpipe.models.checkpoint import is_mtp_weight
from rlpipe.models.delta_net import DeltaNet
from rlpipe.weights.fingerprint import Parts, fingerprints

DRAFT = "draft."
EXPERTS = ".experts."  # in the names of their weights on a server
SHARED = ".shared_experts."  # and of those that read every token, as wide as so many experts
UNSENT = "visual."  # of a server: its vision tower stays as it was loaded


@dataclass(slots=True, kw_only=True)
class CanaryReport:
    """What a check found: names of tensors that differ, by role; reasons: why, by name, where it is known."""

    target: list[str] = field(default_factory=list)
    draft: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the server holds exactly what was sent."""
        return not (self.target or self.draft)

    def summary(self) -> str:
        """One line for people."""
        if self.passed:
            return "target and draft are as sent"
        parts = [(n, names) for n, names in (("target", self.target), ("draft", self.draft)) if names]
        told = []
        for role, names in parts:
            names = sorted(names, key=lambda name: name not in self.reasons)  # one that says most first
            reason = self.reasons.get(names[0])
            told.append(f"{len(names)} of the {role} (first {names[0]}{f': {reason}' if reason else ''})")
        return "; ".join(told)


@dataclass(slots=True, kw_only=True)
class Shard:
    """Which part of each tensor a rank keeps.

    kv_heads: of the model; fewer than ranks are repeated. channels: to which the server pads each expert's on
    all ranks, with zeros; 0 where it keeps them as they are. delta: the model's gated delta nets, if any.
    """

    rank: int = 0
    size: int = 1
    kv_heads: int = 1
    channels: int = 0
    delta: DeltaNet | None = None

    def rows(self, tensor: torch.Tensor, *, of_kv: bool = False) -> torch.Tensor:
        """Its rows of a tensor split by output. of_kv: whether they belong to key or value heads."""
        size, rank = self.size, self.rank
        if of_kv and self.kv_heads < size:
            rank, size = rank // (size // self.kv_heads), self.kv_heads
        return tensor.chunk(size)[rank]

    def pieces(self, tensors: Parts, part: Part) -> Parts:
        """What it keeps of each Hugging Face tensor of one weight."""
        layout = part.layout
        if layout is Layout.DELTA:
            rows = [self.delta.blocks(name) for name in part.hf]
            return [self.rows(x) for tensor, r in zip(tensors, rows, strict=True) for x in tensor.split(r)]
        if layout is Layout.QKV:
            return [self.rows(tensor, of_kv=place > 0) for place, tensor in enumerate(tensors)]
        if layout in (Layout.GATE_UP, Layout.HEADS):
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
        if shard.channels and (EXPERTS in served or SHARED in served):
            count = 1 if EXPERTS in served else int(hf_config.get("n_shared_experts") or 1)
            sent = [_widened(tensor, part.layout, count * shard.channels) for tensor in sent]
        found[served] = shard.pieces(sent, part)
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
    channels: int = 0,
) -> list[dict[str, str]]:
    """What each rank of a server must hold of these weights, as its device hashes it; see `server_parts`."""
    parts = rank_parts(weights, rollout, hf_config, drafter=drafter, channels=channels)
    return [fingerprints(tensors, on_gpu) for tensors in parts]


def rank_parts(
    weights: Mapping[str, torch.Tensor],
    rollout: RolloutConfig,
    hf_config: Mapping[str, Any],
    *,
    drafter: Drafter | None,
    channels: int = 0,
) -> list[dict[str, Parts]]:
    """The tensors of each rank of a server, by name; channels: see `Shard`."""
    size, dtype = rollout.sglang.tp, getattr(torch, rollout.dtype)
    kv_heads = int(hf_config["num_key_value_heads"])
    delta = read_architecture(hf_config).delta
    shards = (
        Shard(rank=rank, size=size, kv_heads=kv_heads, channels=channels, delta=delta) for rank in range(size)
    )
    return [server_parts(weights, dtype, shard, hf_config, drafter=drafter) for shard in shards]


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


def _widened(tensor: torch.Tensor, layout: Layout, channels: int) -> torch.Tensor:
    """An expert's weight with channels of zeros behind its own: rows of gate and up, columns of down."""
    dim = 0 if layout is Layout.GATE_UP else 1
    more = channels - tensor.shape[dim]
    return torch.nn.functional.pad(tensor, (0, 0, 0, more) if dim == 0 else (0, more))


def padded_channels(kinds: Mapping[str, tuple[str, str]], ranks: int) -> int:
    """To how many channels a server pads each expert, from what `explain` returned; 0 if it does not.

    >>> padded_channels({"model.layers.0.mlp.experts.w2_weight": ("float32 8x32x64", "float32 8x32x48")}, 2)
    128
    """
    for name, (kept, wanted) in kinds.items():
        if name.endswith("experts.w2_weight"):
            there, here = (int(kind.rpartition("x")[2]) for kind in (kept, wanted))
            if there > here:
                return there * ranks
    return 0


def compare(expected: Mapping[str, str], served: Mapping[str, str]) -> CanaryReport:
    """Set one rank's checksums against `fingerprints`; a parameter on one side only counts as different.

    served: a hash for each tensor, behind which rlpipe's plugin writes its dtype and shape.

    >>> compare({"a": "0", "draft.b": "1"}, {"a": "0 float32 4x2", "draft.b": "2"}).draft
    ['draft.b']
    """
    report = CanaryReport()
    for name in sorted(served.keys() | expected.keys()):
        if name.startswith(UNSENT) and name not in expected:
            continue
        if served.get(name, "").partition(" ")[0] != expected.get(name, ""):
            bad = report.draft if name.startswith(DRAFT) else report.target
            bad.append(name)
    return report


def explain(
    report: CanaryReport, expected: Mapping[str, Parts], served: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Say of each tensor that differs whether it is one that nobody maps, one that is not there, or another.

    expected: of one rank, by name; they may be on the meta device. served: as for `compare`; where it tells
    no dtype and shape nothing is said. Returns what the server keeps and what was expected, of those whose
    dtype or shape differ.
    """
    others: dict[str, tuple[str, str]] = {}
    for name in (*report.target, *report.draft):
        kept = served.get(name, "").partition(" ")[2]
        if name not in served:
            report.reasons[name] = "the server has no tensor of this name"
        elif not kept:
            continue
        elif name not in expected:
            report.reasons[name] = (
                f"a tensor of the server ({kept}) that no table maps: add it to the family's (rlpipe/models)"
            )
        elif kept != (wanted := described(expected[name], kept)):
            report.reasons[name] = f"the server keeps {kept}, and what was sent is {wanted}"
            others[name] = kept, wanted
    return others


def described(parts: Parts, like: str) -> str:
    """Dtype and shape of a tensor as rlpipe's plugin says it.

    like: what the plugin said. Parts of experts are rows of one matrix here, and a dimension of their own
    there: they are told as the server would, if they fit.

    >>> described([torch.zeros(6, 4)], "float32 2x3x4"), described([torch.zeros(6, 4)], "float32 2x4x4")
    ('float32 2x3x4', 'float32 6x4')
    """
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1:]
    shape, kept = (rows, *columns), tuple(int(size) for size in like.partition(" ")[2].split("x") if size)
    if len(kept) == 3 and len(shape) == 2 and kept[0] * kept[1] == rows and kept[2] == shape[1]:
        shape = kept
    return f"{str(parts[0].dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
