"""Hugging Face weights in and out of a Megatron model, bit for bit.

Owns the name table and the layout of each tensor; reads and writes no files (`hf_layout` does).
Every Megatron parameter is made of one to three HF tensors: `merge` builds the full tensor from them
and `split` is its inverse; `shard_dim` says how tensor parallelism cuts it. So loading is
merge -> pad vocabulary -> take this rank's shard, and exporting is gather -> drop padding -> split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.trainer.model import PolicyModel

Tensors = list[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    hf: their names. shard_dim: dimension cut over tensor parallel ranks (None: replicated).
    merge: HF tensors -> full tensor, such that an even cut along shard_dim gives each rank its own
        heads and its own slice of gate and up. split: its inverse.
    """

    hf: list[str]
    shard_dim: int | None = None
    merge: Callable[[Tensors], torch.Tensor] = lambda tensors: tensors[0]
    split: Callable[[torch.Tensor], Tensors] = lambda full: [full]
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


def export_hf_weights(model: PolicyModel, hf_config: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """All weights under HF names, full, on the CPU; collective over tensor parallel ranks.

    None on ranks other than the first of the tensor parallel group.
    """
    group = model.pg_collection.tp
    tied = model.share_embeddings_and_output_weights
    weights: dict[str, torch.Tensor] = {}
    for _, parameter, entry in _pairs(model, name_table(hf_config, group.size(), tied)):
        full = _gather(parameter.detach(), entry.shard_dim, group)
        if full is None:
            continue
        if entry.vocab:
            full = full[: model.vocab_real]
        for name, tensor in zip(entry.hf, entry.split(full), strict=True):
            weights[name] = tensor.to("cpu", copy=True).contiguous()
    if group.rank() != 0:
        return None
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def name_table(hf_config: Mapping[str, Any], tp: int, tied: bool) -> dict[str, Entry]:
    """Megatron parameter name (local or TransformerEngine spec) -> Entry."""
    table = {
        "embedding.word_embeddings.weight": Entry(hf=["model.embed_tokens.weight"], shard_dim=0, vocab=True),
        "decoder.final_layernorm.weight": Entry(hf=["model.norm.weight"]),
    }
    if not tied:
        table["output_layer.weight"] = Entry(hf=["lm_head.weight"], shard_dim=0, vocab=True)
    for i in range(int(hf_config["num_hidden_layers"])):
        table |= _layer(f"decoder.layers.{i}.", f"model.layers.{i}.", hf_config, tp)
    for i in range(int(hf_config.get("num_nextn_predict_layers") or 0)):
        table |= _mtp_layer(f"mtp.layers.{i}.", f"model.mtp_layers.{i}.", hf_config, tp)
    return table


def _mtp_layer(ours: str, theirs: str, hf_config: Mapping[str, Any], tp: int) -> dict[str, Entry]:
    return {
        ours + "enorm.weight": Entry(hf=[theirs + "token_layernorm.weight"]),
        ours + "hnorm.weight": Entry(hf=[theirs + "hidden_layernorm.weight"]),
        # Megatron projects cat(embedding, hidden), MiMo cat(hidden, embedding)
        ours + "eh_proj.weight": Entry(
            hf=[theirs + "input_proj.weight"],
            shard_dim=0,
            merge=lambda tensors: _swap_halves(tensors[0]),
            split=lambda full: [_swap_halves(full)],
        ),
        ours + "final_layernorm.weight": Entry(hf=[theirs + "final_layernorm.weight"]),
        **_layer(ours + "transformer_layer.", theirs, hf_config, tp),
    }


def _layer(ours: str, theirs: str, hf_config: Mapping[str, Any], tp: int) -> dict[str, Entry]:
    heads = int(hf_config["num_attention_heads"])
    groups = int(hf_config.get("num_key_value_heads") or heads)
    dim = int(hf_config.get("head_dim") or hf_config["hidden_size"] // heads)
    sizes = [heads // groups * dim, dim, dim]  # rows of q, k, v in one query group

    def merge_qkv(tensors: Tensors) -> torch.Tensor:
        grouped = [t.view(groups, rows, -1) for t, rows in zip(tensors, sizes, strict=True)]
        return torch.cat(grouped, dim=1).reshape(groups * sum(sizes), *tensors[0].shape[1:])

    def split_qkv(full: torch.Tensor) -> Tensors:
        grouped = full.view(groups, sum(sizes), -1).split(sizes, dim=1)
        return [t.reshape(-1, *full.shape[1:]) for t in grouped]

    def merge_gate_up(tensors: Tensors) -> torch.Tensor:
        pairs = zip(*(t.chunk(tp) for t in tensors), strict=True)  # a slice of gate and of up per rank
        return torch.cat([part for pair in pairs for part in pair])

    def split_gate_up(full: torch.Tensor) -> Tensors:
        parts = full.chunk(2 * tp)
        return [torch.cat(parts[0::2]), torch.cat(parts[1::2])]

    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    input_norm = Entry(hf=[theirs + "input_layernorm.weight"])
    mlp_norm = Entry(hf=[theirs + "post_attention_layernorm.weight"])

    def qkv(kind: str) -> Entry:
        names = [f"{attention}{x}_proj.{kind}" for x in "qkv"]
        return Entry(hf=names, shard_dim=0, merge=merge_qkv, split=split_qkv)

    return {
        ours + "input_layernorm.weight": input_norm,
        ours + "self_attention.linear_qkv.layer_norm_weight": input_norm,  # TransformerEngine fuses it
        ours + "pre_mlp_layernorm.weight": mlp_norm,
        ours + "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        ours + "self_attention.linear_qkv.weight": qkv("weight"),
        ours + "self_attention.linear_qkv.bias": qkv("bias"),
        ours + "self_attention.q_layernorm.weight": Entry(hf=[attention + "q_norm.weight"]),
        ours + "self_attention.k_layernorm.weight": Entry(hf=[attention + "k_norm.weight"]),
        ours + "self_attention.linear_proj.weight": Entry(hf=[attention + "o_proj.weight"], shard_dim=1),
        ours + "mlp.linear_fc1.weight": Entry(
            hf=[mlp + "gate_proj.weight", mlp + "up_proj.weight"],
            shard_dim=0,
            merge=merge_gate_up,
            split=split_gate_up,
        ),
        ours + "mlp.linear_fc2.weight": Entry(hf=[mlp + "down_proj.weight"], shard_dim=1),
    }


def _pairs(model: PolicyModel, table: Mapping[str, Entry]) -> Iterator[tuple[str, torch.nn.Parameter, Entry]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, table[name]


def _swap_halves(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _cut(full: torch.Tensor, entry: Entry, rank: int, size: int) -> torch.Tensor:
    return full if entry.shard_dim is None else full.chunk(size, dim=entry.shard_dim)[rank]


def _gather(shard: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor | None:
    """The full tensor on the group's first rank, None elsewhere."""
    if dim is None or group.size() == 1:
        return shard if group.rank() == 0 else None
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=dim) if group.rank() == 0 else None
