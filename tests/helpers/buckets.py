"""Weights as a rank streams them by buckets, and how much memory that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlpipe.config.trainer import TrainerConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.trainer.hf_bridge import Bucket
from rlpipe.trainer.megatron import MegatronTrainer
from tests.helpers.trainers import make_trainer, meet


def streamed(
    rank: int, world_size: int, folder: Path, path: Path, configs: dict[str, TrainerConfig], megabytes: int
) -> dict[str, dict[str, Any]]:
    """By config, of an untrained trainer: its full export, its buckets, and the most memory they held.

    different: tensors that are not those of the checkpoint, bit for bit, in each of the ways to get them.
    """
    torch.set_num_threads(1)
    told, shipped = {}, read_weights(path)
    narrow = {name: tensor.bfloat16() for name, tensor in shipped.items()}
    for number, (name, config) in enumerate(configs.items()):
        master = meet(rank, world_size, folder / f"{world_size}-{number}") if world_size > 1 else None
        trainer = make_trainer(path, config, rank=rank, world_size=world_size, master=master)
        plan = trainer.bucket_plan(megabytes, torch.float32)
        export = trainer.export_weights()
        buckets = _copied(trainer, megabytes, torch.float32)
        halves = _copied(trainer, megabytes, torch.bfloat16)
        everywhere = _copied(trainer, megabytes, torch.float32, everywhere=True)
        told[name] = {
            "exports": export is not None,
            "different": {
                "export": _different(export or {}, shipped),
                "buckets": _different(_together(buckets), shipped),
                "bfloat16": _different(_together(halves), narrow),
            },
            "everywhere": _different(_together(everywhere), shipped),
            "planned": [_form(bucket) for bucket in everywhere] == [_form(bucket) for bucket in plan],
            "plan": [_form(bucket) for bucket in plan],
            "buckets": [_form(bucket) for bucket in buckets],
            "bfloat16": [_form(bucket) for bucket in halves],
            "sizes": [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets],
            "most_held": _most_held(trainer, megabytes),
        }
        trainer.close()
    return told


class Held(TorchDispatchMode):
    """most: bytes of tensors that were made under this mode and not yet freed, at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {
            id_of(one)
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor) and not one.is_meta
        }
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:  # the latter take no memory
                continue
            if id_of(tensor) not in given:
                storage = tensor.untyped_storage()
                self._alive[id_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return made


def id_of(tensor: torch.Tensor) -> int:
    """Of the memory a tensor lies in."""
    return tensor.untyped_storage()._cdata


def _copied(
    trainer: MegatronTrainer, megabytes: int, dtype: torch.dtype, *, everywhere: bool = False
) -> list[Bucket]:
    buckets = trainer.weight_buckets(megabytes, dtype, everywhere=everywhere)
    return [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets]


def _together(buckets: list[Bucket]) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in bucket}


def _form(bucket: Bucket) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in bucket]


def _different(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names that one side lacks, or whose tensors differ."""
    both = found.keys() & wanted.keys()
    return sorted(
        (found.keys() ^ wanted.keys())
        | {name for name in both if not torch.equal(found[name], wanted[name])}
        | {name for name in both if found[name].dtype is not wanted[name].dtype}
    )


def _most_held(trainer: MegatronTrainer, megabytes: int) -> int:
    with Held() as held:
        for _ in trainer.weight_buckets(megabytes, torch.float32):
            pass
    return held.most
