"""Gradients of a whole model in float64 under any parallel sizes, by Hugging Face names, for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from rlpipe.batching.micro_batch import MicroBatch
from rlpipe.trainer.passes import Predictions, schedule
from tests.helpers.float64 import in_float64
from tests.helpers.trainers import Run, make_batch, make_trainer, meet, train


def gradients(
    rank: int, world_size: int, folder: Path, runs: dict[str, Run]
) -> dict[str, dict[str, np.ndarray] | None]:
    """Gradients of half the sum of squares of all logits and draft states of a batch; rank 0 alone has them.

    So every number that the model computes has a part in them, in float64 from end to end: packed rows,
    shared prefixes, Megatron's schedule and the sums over ranks are those of training, the loss is not.
    """
    torch.set_num_threads(1)
    found = {}
    for number, (name, run) in enumerate(runs.items()):
        address = folder / f"gradients{number}"
        master = meet(rank, world_size, address) if world_size > 1 else None
        place = {"rank": rank, "world_size": world_size, "master": master}
        trainer = make_trainer(run.path, run.config, run.algo, run.mtp, **place)
        found[name] = _gradients(trainer, run)
        trainer.close()
    return found


def gradients_and_training(
    rank: int, world_size: int, folder: Path, derived: dict[str, Run], runs: dict[str, Run]
) -> dict[str, Any]:
    """Both in one launch; gradients under "gradients/" and their names."""
    found = gradients(rank, world_size, folder, derived)
    named = {f"gradients/{name}": value for name, value in found.items()}
    return named | train(rank, world_size, folder, runs)


def _gradients(trainer: Any, run: Run) -> dict[str, np.ndarray] | None:
    model = in_float64(trainer.model)
    model.config.pipeline_dtype = torch.float64
    model.stage_shapes = None  # they were of float32
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    shard = make_batch(run.groups[0], run.algo, run.config.dp).minibatches[0].shards[trainer._dp_rank]
    drafts = trainer.trains_draft
    # Megatron takes means over micro-batches and data parallel ranks, and sums those of context parallel ones
    scale = len(shard) * run.config.dp / run.config.cp

    def loss_of(index: int, micro: MicroBatch, predicted: Predictions) -> Any:
        total = predicted.logits().square().sum()
        aligned = trainer._drafting._aligned(model, micro, predicted.hidden) if drafts else None
        if aligned is not None:
            _, states, _, targets = aligned
            total = total + states[targets.mask].square().sum()
        return total * scale / 2, None

    schedule(wrapped, shard, trainer._passes.forward(wrapped, loss_of, temperature=1.0), forward_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    exported = trainer.export_weights()
    return None if exported is None else {name: tensor.numpy() for name, tensor in exported.items()}
