"""Hugging Face weights in and out of a Megatron model, bit for bit.

Owns the layout of each tensor; names come from the family's table (`rlpipe/models`), files are
read and written by `models.checkpoint`.
Every Megatron parameter is made of one to three HF tensors: `merge` builds the full tensor from them
and `split` is its inverse; `shard_dim` says how tensor parallelism cuts it. So loading is
merge -> pad vocabulary -> take this rank's shard, and exporting is gather -> drop padding -> split, by
buckets: one gathering each, so that memory is bounded however large the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.models import family_of, read_architecture
from rlpipe.models.base import EMBEDDING, FINAL_NORM, HEAD, Architecture, Layout, Part
from rlpipe.trainer.model import PolicyModel

Tensors = list[torch.Tensor]
Merge = Callable[[Tensors], torch.Tensor]
Split = Callable[[torch.Tensor], Tensors]
Bucket = list[tuple[str, torch.Tensor]]
BUCKET_MB = 256  # gathered at once where nothing else is said


@dataclass(slots=True, kw_only=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    hf: their names. shard_dim: dimension cut over tensor parallel ranks (None: replicated).
    merge: HF tensors -> full tensor, such that an even cut along shard_dim gives each rank its own
        heads and its own slice of gate and up. split: its inverse.
    """

    hf: list[str]
    shard_dim: int | None = None
    merge: Merge = lambda tensors: tensors[0]
    split: Split = lambda full: [full]
    vocab: bool = False


def load_hf_weights(
    model: PolicyModel, hf_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> None:
    """Copy HF tensors into the model's parameters, this rank's shard of each.

    Raises ValueError naming what is missing, left over or of the wrong shape.
    """
    table = name_table(hf_config, model.pg_collection.tp.size(), model.share_embeddings_and_output_weights)
    wanted = {name for _, _, entry in _pairs(model, table) for name in entry.hf}
    if missing := sorted(wanted - weights.keys()):
        raise ValueError(f"the checkpoint lacks {missing[:4]} ({len(missing)} tensors in all).")
    if extra := sorted(weights.keys() - wanted - {"lm_head.weight"}):
        raise ValueError(f"the checkpoint holds tensors this model has no place for: {extra[:4]}.")
    with torch.no_grad():
        for name, parameter, entry in _pairs(model, table):
            full = entry.merge([weights[hf] for hf in entry.hf])
            if entry.vocab:
                full = torch.nn.functional.pad(full, (0, 0, 0, model.vocab_size - full.shape[0]))
            shard = _cut(full, entry, model.pg_collection.tp.rank(), model.pg_collection.tp.size())
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{entry.hf} make {tuple(shard.shape)} but {name} is {tuple(parameter.shape)}: "
                    "config.json and the weights disagree."
                )
            parameter.copy_(shard)


def weight_buckets(
    model: PolicyModel,
    hf_config: Mapping[str, Any],
    *,
    megabytes: int = BUCKET_MB,
    dtype: torch.dtype | None = None,
) -> Iterator[Bucket]:
    """Full tensors under HF names, where the model lies, gathered over tensor parallel ranks by buckets.

    megabytes: most of one bucket; what one Megatron parameter makes stays together, and may be more alone.
    dtype: of what is gathered (None: as trained). A tied head has no name of its own here.

    Collective: every rank of the group must come to the end. Only the first yields; it holds about four
    buckets at a time (the one its caller still has, the parts of the next, and what is made of them), the
    others their part of one. Tensors may be the parameters themselves: copy what is kept.
    """
    group = model.pg_collection.tp
    for parts in _cut_into_buckets(model, hf_config, megabytes, dtype):
        shards = [parameter.detach().to(dtype or parameter.dtype) for parameter, _ in parts]
        full = _gather(shards, [entry.shard_dim for _, entry in parts], group)
        del shards
        if full is not None:
            yield _as_hf(full, [entry for _, entry in parts], model.vocab_real)


def bucket_plan(
    model: PolicyModel,
    hf_config: Mapping[str, Any],
    *,
    megabytes: int = BUCKET_MB,
    dtype: torch.dtype | None = None,
) -> list[Bucket]:
    """What `weight_buckets` will yield: names, types and shapes, as tensors on the meta device."""
    size, plan = model.pg_collection.tp.size(), []
    for parts in _cut_into_buckets(model, hf_config, megabytes, dtype):
        full = [
            torch.empty(_full_shape(parameter, entry, size), dtype=dtype or parameter.dtype, device="meta")
            for parameter, entry in parts
        ]
        plan.append(_as_hf(full, [entry for _, entry in parts], model.vocab_real))
    return plan


def export_hf_weights(model: PolicyModel, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """All weights under HF names, full, on the CPU; collective over tensor parallel ranks.

    None on ranks other than the first of the tensor parallel group.
    """
    weights = {
        name: tensor.to("cpu", copy=True).contiguous()
        for bucket in weight_buckets(model, hf_config)
        for name, tensor in bucket
    }
    if model.pg_collection.tp.rank() != 0:
        return None
    if model.share_embeddings_and_output_weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def name_table(hf_config: Mapping[str, Any], tp: int, tied: bool) -> dict[str, Entry]:
    """Megatron parameter name (local or TransformerEngine spec) -> Entry, from the family's table."""
    family, arch = family_of(hf_config), read_architecture(hf_config)
    layer, table = family.layer_parts(hf_config), {}

    def add(parts: Iterable[Part], ours: str = "", theirs: str = "") -> None:
        for part in parts:
            entry = _entry(part, theirs, arch, tp)
            table.update({ours + name: entry for name in part.megatron})

    add([EMBEDDING, FINAL_NORM] + ([] if tied else [HEAD]))
    for i in range(arch.layers):
        add(layer, f"decoder.layers.{i}.", f"model.layers.{i}.")
    for i in range(arch.mtp_layers):
        add(family.draft, f"mtp.layers.{i}.", f"model.mtp_layers.{i}.")
        add(layer, f"mtp.layers.{i}.transformer_layer.", f"model.mtp_layers.{i}.")
    return table


def _entry(part: Part, prefix: str, arch: Architecture, tp: int) -> Entry:
    hf = [prefix + name for name in part.hf]
    if part.layout is Layout.QKV:
        merge, split = _by_query_group(arch)
        return Entry(hf=hf, shard_dim=0, merge=merge, split=split)
    if part.layout is Layout.GATE_UP:
        merge, split = _by_rank(tp)
        return Entry(hf=hf, shard_dim=0, merge=merge, split=split)
    if part.layout is Layout.SWAPPED:
        return Entry(
            hf=hf,
            shard_dim=0,
            merge=lambda tensors: _swap_halves(tensors[0]),
            split=lambda full: [_swap_halves(full)],
        )
    if part.layout is Layout.VOCABULARY:
        return Entry(hf=hf, shard_dim=0, vocab=True)
    return Entry(hf=hf, shard_dim=1 if part.layout is Layout.COLUMNS else None)


def _by_query_group(arch: Architecture) -> tuple[Merge, Split]:
    groups = arch.kv_heads
    sizes = [arch.heads // groups * arch.head_dim, arch.head_dim, arch.head_dim]  # rows of q, k, v in a group

    def merge(tensors: Tensors) -> torch.Tensor:
        grouped = [t.view(groups, rows, -1) for t, rows in zip(tensors, sizes, strict=True)]
        return torch.cat(grouped, dim=1).reshape(groups * sum(sizes), *tensors[0].shape[1:])

    def split(full: torch.Tensor) -> Tensors:
        grouped = full.view(groups, sum(sizes), -1).split(sizes, dim=1)
        return [t.reshape(-1, *full.shape[1:]) for t in grouped]

    return merge, split


def _by_rank(tp: int) -> tuple[Merge, Split]:
    def merge(tensors: Tensors) -> torch.Tensor:
        pairs = zip(*(t.chunk(tp) for t in tensors), strict=True)  # a slice of gate and of up per rank
        return torch.cat([part for pair in pairs for part in pair])

    def split(full: torch.Tensor) -> Tensors:
        parts = full.chunk(2 * tp)
        return [torch.cat(parts[0::2]), torch.cat(parts[1::2])]

    return merge, split


def _pairs(model: PolicyModel, table: Mapping[str, Entry]) -> Iterator[tuple[str, torch.nn.Parameter, Entry]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]


def _swap_halves(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _cut(full: torch.Tensor, entry: Entry, rank: int, size: int) -> torch.Tensor:
    return full if entry.shard_dim is None else full.chunk(size, dim=entry.shard_dim)[rank]


def _cut_into_buckets(
    model: PolicyModel, hf_config: Mapping[str, Any], megabytes: int, dtype: torch.dtype | None
) -> Iterator[list[tuple[torch.nn.Parameter, Entry]]]:
    """Consecutive parameters of one type, whose full tensors have at most `megabytes`; a larger one alone.

    The experts of a layer stay together whatever they have: a server keeps them in one tensor.
    """
    size = model.pg_collection.tp.size()
    table = name_table(hf_config, size, model.share_embeddings_and_output_weights)
    bucket: list[tuple[torch.nn.Parameter, Entry]] = []
    held, layer = 0, ""
    for name, parameter, entry in _pairs(model, table):
        num_bytes = math.prod(_full_shape(parameter, entry, size)) * (dtype or parameter.dtype).itemsize
        full = held + num_bytes > megabytes * 2**20
        before, (layer, *expert) = layer, name.split(".local_experts.")
        together = expert and layer == before
        if bucket and not together and (full or expert or parameter.dtype is not bucket[0][0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append((parameter, entry))
        held += num_bytes
    yield bucket


def _full_shape(parameter: torch.Tensor, entry: Entry, size: int) -> list[int]:
    """Shape of the tensor that `size` ranks hold together, a padded vocabulary included."""
    shape = list(parameter.shape)
    if entry.shard_dim is not None:
        shape[entry.shard_dim] *= size
    return shape


def _as_hf(full: Tensors, entries: Sequence[Entry], vocab: int) -> Bucket:
    return [
        pair
        for tensor, entry in zip(full, entries, strict=True)
        for pair in zip(entry.hf, entry.split(tensor[:vocab] if entry.vocab else tensor), strict=True)
    ]


def _gather(shards: Tensors, dims: Sequence[int | None], group: dist.ProcessGroup) -> Tensors | None:
    """Full tensors on the group's first rank, None elsewhere; one collective. dims: None is not sharded."""
    cut = [shard for shard, dim in zip(shards, dims, strict=True) if dim is not None]
    parts = [cut]
    if group.size() > 1 and cut:
        flat = torch.cat([shard.reshape(-1) for shard in cut])
        first = group.rank() == 0
        received = [torch.empty_like(flat) for _ in range(group.size())] if first else None
        dist.gather(flat, received, group=group, group_dst=0)
        lengths = [shard.numel() for shard in cut]
        parts = [part.split(lengths) for part in received or []]
    if group.rank() != 0:
        return None
    whole = iter(zip(*parts, strict=True))
    return [
        shard if dim is None else _join([p.view(shard.shape) for p in next(whole)], dim)
        for shard, dim in zip(shards, dims, strict=True)
    ]


def _join(parts: Tensors, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
