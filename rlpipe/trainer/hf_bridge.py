"""Loads Hugging Face weights into a Megatron model and exports them, bit for bit.

Owns the layout of each tensor; names come from the model family's table (`rlpipe/models`), and
`models.checkpoint` reads and writes files.
Every Megatron parameter is made of one to three HF tensors: `merge` builds the full tensor from them and
`split` is its inverse; `shard_dim` is the dimension that tensor parallelism cuts. So loading is merge -> pad
vocabulary -> take this rank's shard, and exporting is gather -> drop padding -> split. Weights are gathered
and exported bucket by bucket, so that memory is bounded for any model size. With expert parallelism a rank
holds some of the model's experts; they are gathered from the expert parallel ranks too. With pipeline
parallelism each bucket belongs to one stage; the first rank of the stage sends it to rank 0 (`stages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.models import family_of, read_architecture
from rlpipe.models.base import EMBEDDING, FINAL_NORM, HEAD, Architecture, Layout, Part
from rlpipe.models.latent import travels_with
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.stages import EMBEDDING_COPY, TIED_HEAD, hand_over, is_copy, share, tensors_of_stages

Tensors = list[torch.Tensor]
Merge = Callable[[Tensors], torch.Tensor]
Split = Callable[[torch.Tensor], Tensors]
Bucket = list[tuple[str, torch.Tensor]]
BUCKET_MB = 256  # default size of a bucket


@dataclass(slots=True, kw_only=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    hf: names of the HF tensors. shard_dim: dimension cut over tensor parallel ranks (None: replicated).
    merge: HF tensors -> full tensor, such that an even cut along shard_dim gives each rank its
        heads and its slice of gate and up. split: its inverse. vocab: whether its rows are tokens, which need
        the padding of the vocabulary.
    """

    hf: list[str]
    shard_dim: int | None = None
    merge: Merge = lambda tensors: tensors[0]
    split: Split = lambda full: [full]
    vocab: bool = False


@dataclass(slots=True, kw_only=True)
class _Piece:
    """One parameter of this rank or (on the meta device) of another stage, with its HF tensors.

    name: name in the full model. stage: index of the pipeline stage that holds it. parameter: may also be a
        router's buffer. entries: one for each expert parallel rank, describing the parameter of this name on
        that rank; a single one where all ranks hold the same. rank: index of this rank's entry.
        experts: name of the MoE layer it belongs to, empty if none. float32: export it in float32, whatever
        dtype the others have.
    """

    name: str
    stage: int
    parameter: torch.Tensor
    entries: list[Entry]
    rank: int
    experts: str
    float32: bool

    @property
    def entry(self) -> Entry:
        """The entry of this rank's parameter."""
        return self.entries[self.rank]

    def dtype(self, requested: torch.dtype | None) -> torch.dtype:
        """Return the dtype to gather in. requested: the dtype requested for all (None: as trained)."""
        return torch.float32 if requested and self.float32 else requested or self.parameter.dtype

    def full_shape(self, tp: int) -> list[int]:
        """Return the shape of the full tensor on `tp` ranks, including the padding of the vocabulary."""
        shape = list(self.parameter.shape)
        if self.entry.shard_dim is not None:
            shape[self.entry.shard_dim] *= tp
        return shape


def load_hf_weights(
    model: PolicyModel, hf_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> None:
    """Copy this rank's shards of HF tensors into the model's parameters.

    Raises ValueError that names tensors that are missing, unused or of the wrong shape.
    """
    pieces, group = _pieces(model, hf_config), model.pg_collection.tp
    wanted = {name for piece in pieces for entry in piece.entries for name in entry.hf}
    stage = model.pg_collection.pp.rank()

    # Compare names over all stages and ranks. A checkpoint with a tied head may store the head as well.
    if missing := sorted(wanted - weights.keys()):
        raise ValueError(f"the checkpoint lacks {missing[:4]} ({len(missing)} tensors in all).")
    if extra := sorted(weights.keys() - wanted - {"lm_head.weight"}):
        raise ValueError(f"the checkpoint holds tensors this model has no place for: {extra[:4]}.")

    with torch.no_grad():
        for piece in (piece for piece in pieces if piece.stage == stage):
            parameter, entry = piece.parameter, piece.entry

            # Build the full tensor, pad its vocabulary and take this rank's shard.
            full = entry.merge([weights[hf] for hf in entry.hf])
            if entry.vocab:
                full = torch.nn.functional.pad(full, (0, 0, 0, model.vocab_size - full.shape[0]))
            shard = _cut(full, entry, rank=group.rank(), size=group.size())

            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{entry.hf} make {tuple(shard.shape)} but {piece.name} is {tuple(parameter.shape)}: "
                    "config.json and the weights disagree."
                )
            parameter.copy_(shard)


def weight_buckets(
    model: PolicyModel,
    hf_config: Mapping[str, Any],
    *,
    megabytes: int = BUCKET_MB,
    dtype: torch.dtype | None = None,
    everywhere: bool = False,
) -> Iterator[Bucket]:
    """Gather full tensors over the ranks that share the model; yield them under HF names, in buckets.

    megabytes: maximum size of a bucket, except that the tensors of one Megatron parameter always share a
    bucket. dtype: dtype to gather in (None: as trained). A tied head is not listed separately. Tensors are on
    the model's device.

    Collective: every tensor, expert and pipeline parallel rank must iterate to the end. Only rank 0 yields
    or, if `everywhere`, every rank of every replica. A rank that yields has about four buckets in memory (the
    bucket that its caller still uses, the shards of the next one, and the tensors made of these); other ranks
    have their shards of one. Tensors may share memory with the parameters: copy those that you keep. LoRA
    adapters are merged.
    """
    groups = model.pg_collection
    for parts in _cut_into_buckets(model, hf_config, megabytes=megabytes, dtype=dtype):
        experts = parts[0].experts

        # All expert parallel ranks hold the same tensors outside of experts: the first one exports them.
        if groups.ep.rank() and not experts and not everywhere:
            continue

        # Gather on the first rank of the stage that holds the bucket, or on all of its ranks.
        full, stage = None, parts[0].stage
        if stage == groups.pp.rank():
            shards = [model.merged(part.parameter).to(part.dtype(dtype)) for part in parts]
            dims = [part.entry.shard_dim for part in parts]
            group = groups.tp_ep if experts else groups.tp
            full = _gather(shards, dims, group=group, tp=groups.tp.size(), everywhere=everywhere)
            del shards

        # Send a later stage's bucket to the first stage or, if `everywhere`, from each rank to all stages.
        if (groups.pp.size() > 1 and everywhere) or (stage and groups.tp_ep.rank() == 0):
            blank = _blank(parts, groups.tp.size(), dtype)
            device = next(model.parameters()).device
            transfer = share if everywhere else hand_over
            full = transfer(full, blank, stage=stage, stages=groups.pp, device=device)

        if full is not None:
            yield _as_hf(full, _in_turn(parts), model.vocab_real)


def bucket_plan(
    model: PolicyModel,
    hf_config: Mapping[str, Any],
    *,
    megabytes: int = BUCKET_MB,
    dtype: torch.dtype | None = None,
) -> list[Bucket]:
    """List the buckets of `weight_buckets`: names, types and shapes, as tensors on the meta device."""
    size, plan = model.pg_collection.tp.size(), []
    for parts in _cut_into_buckets(model, hf_config, megabytes=megabytes, dtype=dtype):
        plan.append(_as_hf(_blank(parts, size, dtype), _in_turn(parts), model.vocab_real))
    return plan


def export_hf_weights(model: PolicyModel, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Gather all full weights under HF names, on the CPU; collective like `weight_buckets`.

    A tied head is the embedding and has no separate entry. Returns None on ranks other than the first.
    """
    weights = {
        name: tensor.to("cpu", copy=True).contiguous()
        for bucket in weight_buckets(model, hf_config)
        for name, tensor in bucket
    }

    # Only rank 0 received tensors.
    return None if model.pg_collection.tp_ep.rank() or model.pg_collection.pp.rank() else weights


def name_table(hf_config: Mapping[str, Any], tp: int, *, tied: bool) -> dict[str, Entry]:
    """Map Megatron's parameter names (local or TransformerEngine spec) to entries of the family's table."""
    family, arch = family_of(hf_config), read_architecture(hf_config)
    layer, table = family.layer_parts(hf_config), {}

    # One entry may have several Megatron names, as the two specs differ.
    def add(parts: Iterable[Part], megatron_prefix: str = "", hf_prefix: str = "") -> None:
        for part in parts:
            entry = _entry(part, prefix=hf_prefix, arch=arch, tp=tp)
            table.update({megatron_prefix + name: entry for name in part.megatron})

    add([EMBEDDING, FINAL_NORM] + ([] if tied else [HEAD]))
    for i in range(arch.layers):
        add(layer, f"decoder.layers.{i}.", f"model.layers.{i}.")
    for i in range(arch.mtp_layers):
        add(family.draft, f"mtp.layers.{i}.", f"model.mtp_layers.{i}.")
        add(layer, f"mtp.layers.{i}.transformer_layer.", f"model.mtp_layers.{i}.")
    return table


def _entry(part: Part, *, prefix: str, arch: Architecture, tp: int) -> Entry:
    """Return the entry of one part of a layer, depending on its layout."""
    hf = [prefix + name for name in part.hf]

    # Layouts that rearrange rows or columns.
    if part.layout is Layout.QKV:
        merge, split = _by_query_group(arch)
        return Entry(hf=hf, shard_dim=0, merge=merge, split=split)
    if part.layout is Layout.DELTA:
        merge, split = _by_key_head(arch, part.hf)
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

    # Layouts that only cut the tensor.
    if part.layout is Layout.VOCABULARY:
        return Entry(hf=hf, shard_dim=0, vocab=True)
    if part.layout in (Layout.ROWS, Layout.HEADS):
        return Entry(hf=hf, shard_dim=0)
    return Entry(hf=hf, shard_dim=1 if part.layout is Layout.COLUMNS else None)


def _by_query_group(arch: Architecture) -> tuple[Merge, Split]:
    """Return merge and split of q, k and v: in Megatron the rows of a query group are consecutive."""
    groups = arch.kv_heads

    # HF stores an output gate after each query head; Megatron stores a group's gates after its queries.
    gated = 2 if arch.delta else 1
    queries = arch.heads // groups
    sizes = [gated * queries * arch.head_dim, arch.head_dim, arch.head_dim]  # rows of q, k, v in a group

    def regrouped(query: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Transpose the grid of head blocks, rows x columns, within each group."""
        blocks = query.reshape(groups, rows, columns, arch.head_dim, -1)
        return blocks.transpose(1, 2).reshape(query.shape)

    def merge(tensors: Tensors) -> torch.Tensor:
        tensors = [regrouped(tensors[0], queries, gated), *tensors[1:]]
        grouped = [t.view(groups, rows, -1) for t, rows in zip(tensors, sizes, strict=True)]
        return torch.cat(grouped, dim=1).reshape(groups * sum(sizes), *tensors[0].shape[1:])

    def split(full: torch.Tensor) -> Tensors:
        grouped = full.view(groups, sum(sizes), -1).split(sizes, dim=1)
        query, key, value = (t.reshape(-1, *full.shape[1:]) for t in grouped)
        return [regrouped(query, gated, queries), key, value]

    return merge, split


def _by_key_head(arch: Architecture, names: Sequence[str]) -> tuple[Merge, Split]:
    """Return merge and split of a delta net's weight: in Megatron the rows of a key head are consecutive.

    names: names of the weight's HF tensors.
    """
    heads, blocks = arch.delta.key_heads, [arch.delta.blocks(name) for name in names]

    def merge(tensors: Tensors) -> torch.Tensor:
        parts = [part for tensor, rows in zip(tensors, blocks, strict=True) for part in tensor.split(rows)]
        return torch.cat([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)

    def split(full: torch.Tensor) -> Tensors:
        by_head = full.view(heads, -1, *full.shape[1:])
        parts = iter(by_head.split([rows // heads for rows in chain(*blocks)], dim=1))
        return [torch.cat([next(parts).flatten(0, 1) for _ in rows]) for rows in blocks]

    return merge, split


def _by_rank(tp: int) -> tuple[Merge, Split]:
    """Return merge and split of gate and up: in Megatron a rank has a slice of gate, then one of up."""

    def merge(tensors: Tensors) -> torch.Tensor:
        pairs = zip(*(t.chunk(tp) for t in tensors), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def split(full: torch.Tensor) -> Tensors:
        parts = full.chunk(2 * tp)
        return [torch.cat(parts[0::2]), torch.cat(parts[1::2])]

    return merge, split


def _pieces(model: PolicyModel, hf_config: Mapping[str, Any]) -> list[_Piece]:
    """List every parameter of this rank's pipeline by stage, in order, with the routers' buffers last."""
    groups, pieces = model.pg_collection, []

    # A tied head on a later stage is a copy of the embedding.
    tied = model.share_embeddings_and_output_weights
    table = name_table(hf_config, groups.tp.size(), tied=tied)
    table |= {TIED_HEAD: table[EMBEDDING_COPY]} if tied else {}

    kept = family_of(hf_config).float32
    everywhere = chain.from_iterable(
        ((stage, *pair) for pair in pairs) for stage, pairs in enumerate(tensors_of_stages(model))
    )
    for stage, name, parameter in everywhere:
        # Local expert i is a different expert of the model on each expert parallel rank.
        experts, mark, rest = name.partition(".local_experts.")
        names = [name]
        if mark:
            index, _, matrix = rest.partition(".")
            local = model.config.num_moe_experts // groups.ep.size()
            names = [
                f"{experts}{mark}{rank * local + int(index)}.{matrix}" for rank in range(groups.ep.size())
            ]

        entries, rank = [table[known] for known in names], groups.ep.rank() if mark else 0
        pieces.append(
            _Piece(
                name=name,
                stage=stage,
                parameter=parameter,
                entries=entries,
                rank=rank,
                experts=experts if mark else "",
                float32=entries[rank].hf[0].endswith(kept),
            )
        )
    return pieces


def _in_turn(parts: Sequence[_Piece]) -> list[Entry]:
    """List the entries of all parts, rank by rank."""
    return [entry for turn in zip(*(part.entries for part in parts), strict=True) for entry in turn]


def _swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """Exchange the left and the right half of a weight's columns."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _cut(full: torch.Tensor, entry: Entry, *, rank: int, size: int) -> torch.Tensor:
    """Return one rank's shard of a full tensor."""
    return full if entry.shard_dim is None else full.chunk(size, dim=entry.shard_dim)[rank]


def _cut_into_buckets(
    model: PolicyModel, hf_config: Mapping[str, Any], *, megabytes: int, dtype: torch.dtype | None
) -> Iterator[list[_Piece]]:
    """Yield runs of parameters of one dtype and stage; the full tensors of a run have at most `megabytes`.

    A larger parameter has a separate bucket. Experts of a layer share a bucket only with each other. All
    matrices of an expert are in one bucket, together with one expert of each other expert parallel rank.
    """
    bucket: list[_Piece] = []
    held, size = 0, model.pg_collection.tp.size()

    # Group the parameters that must share a bucket. Copies of the embedding are not exported.
    units: dict[str, list[_Piece]] = {}
    for piece in _pieces(model, hf_config):
        if is_copy(piece.name, piece.stage, tied=model.share_embeddings_and_output_weights):
            continue
        units.setdefault(_expert(piece) or travels_with(piece.entry.hf[0]), []).append(piece)

    # Close a bucket when the next unit does not fit or has another stage or dtype.
    for unit in units.values():
        sizes = (math.prod(part.full_shape(size)) * part.dtype(dtype).itemsize for part in unit)
        num_bytes = len(unit[0].entries) * sum(sizes)
        kind = unit[0].stage, unit[0].experts, unit[0].parameter.dtype
        full = held + num_bytes > megabytes * 2**20
        if bucket and (full or kind != (bucket[0].stage, bucket[0].experts, bucket[0].parameter.dtype)):
            yield bucket
            bucket, held = [], 0

        bucket += unit
        held += num_bytes
    yield bucket


def _expert(piece: _Piece) -> str:
    """Return the name of the expert that a parameter belongs to; empty if none."""
    if not piece.experts:
        return ""
    index = piece.name.rpartition(".local_experts.")[2].partition(".")[0]
    return f"{piece.experts}.{index}"


def _blank(parts: Sequence[_Piece], tp: int, dtype: torch.dtype | None) -> Tensors:
    """List the tensors that gathering a bucket produces, on the meta device."""
    return [
        torch.empty(part.full_shape(tp), dtype=part.dtype(dtype), device="meta")
        for _ in parts[0].entries
        for part in parts
    ]


def _as_hf(full: Tensors, entries: Sequence[Entry], vocab: int) -> Bucket:
    """Split full tensors into named HF tensors, without the padding of the vocabulary."""
    return [
        pair
        for tensor, entry in zip(full, entries, strict=True)
        for pair in zip(entry.hf, entry.split(tensor[:vocab] if entry.vocab else tensor), strict=True)
    ]


def _gather(
    shards: Tensors, dims: Sequence[int | None], *, group: dist.ProcessGroup, tp: int, everywhere: bool
) -> Tensors | None:
    """Gather full tensors with one collective, on the group's first rank or everywhere; None on other ranks.

    dims: the dimension along which `tp` consecutive ranks cut each tensor (None: not cut). In a larger group
        every further run of `tp` ranks holds other tensors, all of them cut; these are appended to the
        result.
    """
    cut = [shard for shard, dim in zip(shards, dims, strict=True) if dim is not None]
    parts = [cut]

    # Send all shards of a rank as one flat tensor.
    if group.size() > 1 and cut:
        flat = torch.cat([shard.reshape(-1) for shard in cut])
        receives = everywhere or group.rank() == 0
        received = [torch.empty_like(flat) for _ in range(group.size())] if receives else None
        if everywhere:
            dist.all_gather(received, flat, group=group)
        else:
            dist.gather(flat, received, group=group, group_dst=0)
        lengths = [shard.numel() for shard in cut]
        parts = [part.split(lengths) for part in received or []]

    if group.rank() != 0 and not everywhere:
        return None

    # Join the shards of each run of `tp` ranks.
    full = []
    for start in range(0, max(1, len(parts)), tp):
        whole = iter(zip(*parts[start : start + tp], strict=True))
        full += [
            shard if dim is None else _join([p.view(shard.shape) for p in next(whole)], dim)
            for shard, dim in zip(shards, dims, strict=True)
        ]
    return full


def _join(parts: Tensors, dim: int) -> torch.Tensor:
    """Concatenate shards; a single shard is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
