"""Checkpoints of the trainer: Megatron's resharding format to resume, Hugging Face's to use elsewhere.

Owns what is in a checkpoint and that it appears complete or not at all: rank 0 renames a temporary
directory after every rank has written. A checkpoint may be loaded with other tp and dp sizes.

    begin_save (copies; collective) -> write (any thread, while training goes on) -> finish (collective)

It is Megatron's asynchronous save, whose writer is a thread of the rank: its own starts processes, which is
neither safe below Ray nor free of leftovers after a crash.
"""

from __future__ import annotations

import functools
import queue
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from rlpipe.algo.rule import CorrectionRule
from rlpipe.models.checkpoint import read_weights, write_checkpoint
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.optimizer import PolicyOptimizer
from rlpipe.trainer.unpickling import nothing_executed


class Resumable(Protocol):
    """The state of a trainer, in the parts that a checkpoint has."""

    model: PolicyModel
    optimizer: PolicyOptimizer
    rule: CorrectionRule | None
    policy_version: int


class Saving:
    """A checkpoint in the making, of a state that was copied. Every rank calls `write`, then all `finish`."""

    def __init__(self, request: AsyncRequest, unfinished: Path, directory: Path) -> None:
        self._unfinished, self._directory = unfinished, directory
        self._function, self._finalize = request.async_fn, request.finalize_fns
        if self._function is not None:  # else there is nothing to write on this rank
            self._rank, planned, self._results = request.async_fn_args
            self._buckets = _copied(planned, request.preload_fn())

    def write(self) -> None:
        """This rank's files. Touches no model and no process group. Raises OSError."""
        if self._function is not None:
            self._function(self._rank, self._buckets, self._results)
            self._buckets = []

    def finish(self) -> None:
        """Once every rank has written: the index of all files, and the name; collective."""
        for finalize in self._finalize:
            finalize()
        if dist.get_rank() == 0:
            self._unfinished.rename(self._directory)
        dist.barrier()


class SavingHf:
    """A Hugging Face checkpoint of weights that were copied, each in its type of `like`; see `Saving`.

    weights: None on a rank that does not write.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor] | None, directory: Path, like: Path) -> None:
        self._weights, self._directory, self._like = weights, directory, like

    def write(self) -> None:
        """All of it. Raises OSError."""
        save_hf(self._weights, self._directory, self._like)
        self._weights = None

    def finish(self) -> None:
        """Nothing is left to do."""


def save(trainer: Resumable, directory: Path) -> None:
    """Write model, optimizer, schedule, version, the correction's state and random states; collective.

    Raises ValueError when the directory exists and OSError when it cannot be written.
    """
    saving = begin_save(trainer, directory)
    saving.write()
    dist.barrier()
    saving.finish()


def begin_save(trainer: Resumable, directory: Path) -> Saving:
    """Copy what `save` writes; collective. Raises as `save` does."""
    if directory.exists():
        raise ValueError(f"{directory} exists: a checkpoint is never overwritten. Save to a new directory.")
    unfinished = directory.with_name(directory.name + ".unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    updates = trainer.optimizer.updates
    # Megatron saves one step count for all groups and refuses to save several
    trainer.optimizer.write_steps(dict.fromkeys(updates, max(updates.values())))
    state = _tensors(trainer, loading=False) | {
        "updates": dict(updates),
        "policy_version": trainer.policy_version,
        "correction": {} if trainer.rule is None else trainer.rule.state_dict(),
        "random": _random_states(),
    }
    filesystem_async._results_queue = queue.Queue()
    strategy = _WriteInProcess("torch_dist", 1, thread_count=1)
    try:
        request = dist_checkpointing.save(
            state, str(unfinished), sharded_strategy=strategy, async_sharded_save=True
        )
        assert request is not None  # an asynchronous save returns one

        return Saving(request, unfinished, directory)
    finally:
        trainer.optimizer.write_steps(updates)


def load(trainer: Resumable, directory: Path) -> None:
    """Restore what `save` wrote; collective.

    Raises ValueError when the directory holds no checkpoint.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise ValueError(
            f"{directory} holds no trainer checkpoint: it was not written by `save`, or in part."
        )
    with nothing_executed(directory):
        restored = dist_checkpointing.load(_tensors(trainer, loading=True), str(directory))
        common = dist_checkpointing.load_common_state_dict(str(directory))
    state = cast("dict[str, Any]", restored)  # a tuple only where mismatches are to be returned

    trainer.model.load_state_dict(state["model"], strict=trainer.model.adapters is None)
    _load_optimizer(trainer.optimizer.inner, state["optimizer"])
    trainer.optimizer.set_updates(common["updates"])
    trainer.policy_version = common["policy_version"]
    if trainer.rule is not None:  # older checkpoints hold the calibration of OBRS alone
        older = {} if "correction" in common else {"kappa": common["kappa"]}
        trainer.rule.load_state_dict(common.get("correction", older))
    _restore_random_states(common["random"])


def save_hf(weights: Mapping[str, torch.Tensor] | None, directory: Path, like: Path) -> None:
    """Write a Hugging Face checkpoint on the rank that holds weights, each tensor in its type of `like`."""
    if weights is None:
        return
    types = {name: tensor.dtype for name, tensor in read_weights(like).items()}
    write_checkpoint(directory, {name: tensor.to(types[name]) for name, tensor in weights.items()}, like)


def _copied(planned: list[Any], staged: list[Any]) -> list[Any]:
    """`staged` was brought to the host by `preload_fn`; what was there before is the trainer's: cloned."""
    copies = []
    for (path, name, (data, tensors)), (*_, (_, owned)) in zip(staged, planned, strict=True):
        own = [
            (item, tensor.clone() if tensor is original else tensor)
            for (item, tensor), (_, original) in zip(tensors, owned, strict=True)
        ]
        copies.append((path, name, (data, own)))
    return copies


def _tensors(trainer: Resumable, *, loading: bool) -> dict[str, Any]:
    """Sharded state of model and optimizer."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainer.model.sharded_state_dict(metadata=metadata)
    if trainer.model.adapters is not None:  # the backbone stays as model.path has it
        model = {name: part for name, part in model.items() if name.startswith(("adapters.", "mtp."))}
    optimizer = trainer.optimizer.inner.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    if not loading:
        states = optimizer.get("optimizer", optimizer).get("state")
        if states is not None:  # Megatron leaves out a step count of 0, and fails without one
            states.setdefault("common_step", torch.tensor(0.0))
    return {"model": model, "optimizer": optimizer}


def _load_optimizer(chained: ChainedOptimizer, state: dict[str, Any]) -> None:
    """Megatron's load with a defect of 0.16.1 made good, met with torch's AdamW.

    The distributed optimizer asks every saved parameter for a `step` it did not save. (Another: afterwards
    all parameters share one `step` tensor, which each would advance; `set_updates` gives each its own.)
    """
    for optimizer in chained.chained_optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            # The instance's attribute hides the method until the state is loaded.
            optimizer._set_main_param_and_optimizer_states = _with_step(  # pyright: ignore[reportAttributeAccessIssue]
                optimizer
            )

    chained.load_state_dict(state)
    for optimizer in chained.chained_optimizers:
        vars(optimizer).pop("_set_main_param_and_optimizer_states", None)


def _with_step(optimizer: DistributedOptimizer) -> Callable[[torch.nn.Parameter, dict[str, Any]], None]:
    """Return the optimizer's setter of a parameter's state, which keeps its `step` where none was saved."""
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_and_step(parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        set_states(parameter, {"step": optimizer.optimizer.state[main_parameter]["step"], **tensors})

    return set_states_and_step


def _random_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


class _WriteInProcess(TorchDistSaveShardedStrategy):
    """Megatron's format, written by the calling process itself."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=functools.partial(_write, transforms=[writer.transforms]))


def _write(rank: int, buckets: list[Any], results: queue.Queue, *, transforms: list[Any]) -> None:
    """Stand-in for `write_preloaded_data_multiproc`: same writer, no processes."""
    written = {}
    for number, bucket in enumerate(buckets):
        # Queues of threads in place of those of processes, which the types of Megatron name.
        answer: Any = queue.Queue()
        pending: Any = queue.Queue()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answer, pending, use_fsync=True
        )
        _, outcome = answer.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
        written[number] = outcome
    results.put(written)
