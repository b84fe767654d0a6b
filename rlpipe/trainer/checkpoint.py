"""Checkpoints of the trainer: Megatron's resharding format to resume, Hugging Face's for other programs.

Owns the content of a checkpoint, and its atomicity: rank 0 renames a temporary directory after every rank has
written. A checkpoint may be loaded with other tp and dp sizes.

    begin_save (copies; collective) -> write (any thread, while training continues) -> finish (collective)

This is Megatron's asynchronous save with a thread of the rank as the writer. Megatron's own writer starts
processes, which is not safe in a Ray worker and leaves processes behind after a crash.
"""

from __future__ import annotations

import functools
import queue
import random
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from rlpipe.algo.rule import CorrectionRule
from rlpipe.config.draft_vocab import write_table
from rlpipe.models.checkpoint import DRAFT_VOCAB, read_weights, write_checkpoint
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.optimizer import PolicyOptimizer
from rlpipe.trainer.optimizer_shards import own_shares
from rlpipe.trainer.unpickling import nothing_executed


class Resumable(Protocol):
    """The state of a trainer that a checkpoint stores."""

    model: PolicyModel
    optimizer: PolicyOptimizer
    rule: CorrectionRule | None
    policy_version: int


class Saving:
    """An unfinished checkpoint of copied state. Every rank must call `write`, then all call `finish`."""

    def __init__(
        self, request: AsyncRequest, unfinished: Path, directory: Path, *, storages: Set[int]
    ) -> None:
        """Copy the planned tensors.

        unfinished: temporary directory. directory: the final directory. storages: addresses of the trainer's
        own memory, see `_copied`.
        """
        self._unfinished, self._directory = unfinished, directory
        self._function, self._finalize = request.async_fn, request.finalize_fns

        # Without a function this rank has no files to write.
        if self._function is not None:
            self._rank, planned, self._results = request.async_fn_args
            self._buckets = _copied(request.preload_fn(), storages)

            # Megatron's writer keeps the tensors of its buckets until the save is finished, but then only
            # counts them.
            for *_, (_, tensors) in planned:
                tensors.clear()

    def write(self) -> None:
        """Write this rank's files, without the model or a process group. Raises OSError."""
        if self._function is not None:
            self._function(self._rank, self._buckets, self._results)
            self._buckets = []

    def finish(self) -> None:
        """Write the index of all files and rename the directory, once every rank has written; collective."""
        for finalize in self._finalize:
            finalize()

        if dist.get_rank() == 0:
            self._unfinished.rename(self._directory)
        dist.barrier()


class SavingHf:
    """An unfinished Hugging Face checkpoint of copied weights, in the dtypes of `like`; see `Saving`.

    weights: None on a rank that does not write. draft_vocab: see `save_hf`.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | None,
        directory: Path,
        like: Path,
        *,
        draft_vocab: Sequence[int] | None = None,
    ) -> None:
        self._weights, self._directory, self._like = weights, directory, like
        self._draft_vocab = draft_vocab

    def write(self) -> None:
        """Write all files. Raises OSError."""
        save_hf(self._weights, self._directory, self._like, draft_vocab=self._draft_vocab)
        self._weights = None

    def finish(self) -> None:
        """Return at once: `write` has completed the checkpoint."""


def save(trainer: Resumable, directory: Path) -> None:
    """Write model, optimizer, schedule, version, state of the correction and random states; collective.

    Raises ValueError when the directory exists and OSError when it cannot be written.
    """
    saving = begin_save(trainer, directory)
    saving.write()
    dist.barrier()
    saving.finish()


def begin_save(trainer: Resumable, directory: Path) -> Saving:
    """Copy the state that `save` writes; collective. Raises the errors of `save`."""
    if directory.exists():
        raise ValueError(f"{directory} exists: a checkpoint is never overwritten. Save to a new directory.")

    # Remove the files of a crashed save before any rank writes.
    unfinished = directory.with_name(directory.name + ".unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()

    # Megatron saves one step count for all groups and refuses to save several.
    updates = trainer.optimizer.updates
    trainer.optimizer.write_steps(dict.fromkeys(updates, max(updates.values())))
    state = _tensors(trainer, loading=False) | {
        "updates": dict(updates),
        "policy_version": trainer.policy_version,
        "correction": {} if trainer.rule is None else trainer.rule.state_dict(),
        "random": _random_states(),
    }

    # Megatron's queue of results is for processes; replace it with a queue for threads.
    filesystem_async._results_queue = queue.Queue()
    strategy = _WriteInProcess("torch_dist", 1, thread_count=1)
    try:
        request = dist_checkpointing.save(
            state, str(unfinished), sharded_strategy=strategy, async_sharded_save=True
        )
        assert request is not None  # an asynchronous save returns one

        return Saving(request, unfinished, directory, storages=_storages(state))
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

    # Megatron returns a tuple only on request. strict=False, as the backbone below LoRA adapters is not
    # saved.
    state = cast("dict[str, Any]", restored)
    trainer.model.load_state_dict(state["model"], strict=trainer.model.adapters is None)
    _load_optimizer(trainer.optimizer.inner, state["optimizer"])
    trainer.optimizer.set_updates(common["updates"])
    trainer.policy_version = common["policy_version"]

    # Older checkpoints contain only the calibration of OBRS.
    if trainer.rule is not None:
        older = {} if "correction" in common else {"kappa": common["kappa"]}
        trainer.rule.load_state_dict(common.get("correction", older))
    _restore_random_states(common["random"])


def save_hf(
    weights: Mapping[str, torch.Tensor] | None,
    directory: Path,
    like: Path,
    *,
    draft_vocab: Sequence[int] | None = None,
) -> None:
    """Write a Hugging Face checkpoint, in the dtypes of `like`, on the rank that has the weights.

    draft_vocab: tokens that the draft was trained on, written as the checkpoint's table of draft tokens; None
    to copy the table of `like`, if it has one.
    """
    if weights is None:
        return

    types = {name: tensor.dtype for name, tensor in read_weights(like).items()}
    write_checkpoint(directory, {name: tensor.to(types[name]) for name, tensor in weights.items()}, like)
    if draft_vocab is not None:
        write_table(directory / DRAFT_VOCAB, draft_vocab)


def _copied(staged: list[Any], storages: Set[int]) -> list[Any]:
    """Clone the tensors that still share memory with the trainer: tensors in one of its storages.

    staged: Megatron's buckets on the host. Megatron has already copied tensors that were on a GPU, and
    tensors on the host that are views of a part of another tensor; these are not copied again.
    """
    return [
        (
            path,
            name,
            (
                data,
                [
                    (item, tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
                    for item, tensor in tensors
                ],
            ),
        )
        for path, name, (data, tensors) in staged
    ]


def _storages(state: dict[str, Any]) -> set[int]:
    """Return the addresses of the memory that holds the tensors of a sharded state."""
    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {entry.data.untyped_storage().data_ptr() for entry in nested_values(sharded)}


def _tensors(trainer: Resumable, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state of model and optimizer."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }

    # With LoRA adapters the backbone is unchanged: it is read from model.path again.
    model = trainer.model.sharded_state_dict(metadata=metadata)
    if trainer.model.adapters is not None:
        model = {name: part for name, part in model.items() if name.startswith(("adapters.", "mtp."))}

    # Megatron leaves out a step count of 0, and fails to save without one.
    with own_shares(trainer.optimizer.inner):
        optimizer = trainer.optimizer.inner.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    if not loading:
        states = optimizer.get("optimizer", optimizer).get("state")
        if states is not None:
            states.setdefault("common_step", torch.tensor(0.0))
    return {"model": model, "optimizer": optimizer}


def _load_optimizer(chained: ChainedOptimizer, state: dict[str, Any]) -> None:
    """Load with Megatron, avoiding a defect of 0.16.1 that occurs with torch's AdamW.

    The distributed optimizer reads a `step` from every saved parameter, although it has saved none. (Another
    defect: afterwards all parameters share one `step` tensor, which each would advance; `set_updates` gives
    each parameter a separate one.)
    """
    for optimizer in chained.chained_optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            # An attribute of the instance hides the method until the state is loaded.
            optimizer._set_main_param_and_optimizer_states = _with_step(  # pyright: ignore[reportAttributeAccessIssue]
                optimizer
            )

    with own_shares(chained):
        chained.load_state_dict(state)
    for optimizer in chained.chained_optimizers:
        vars(optimizer).pop("_set_main_param_and_optimizer_states", None)


def _with_step(optimizer: DistributedOptimizer) -> Callable[[torch.nn.Parameter, dict[str, Any]], None]:
    """Wrap the optimizer's setter of a parameter's state to retain the `step` if none was saved."""
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_and_step(parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        """Set a parameter's state, with the current `step` unless `tensors` has one."""
        group, order = optimizer.model_param_group_index_map[parameter]
        main_parameter = optimizer.optimizer.param_groups[group]["params"][order]
        set_states(parameter, {"step": optimizer.optimizer.state[main_parameter]["step"], **tensors})

    return set_states_and_step


def _random_states() -> dict[str, Any]:
    """Return the states of this rank's random number generators on the CPU."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states that `_random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


class _WriteInProcess(TorchDistSaveShardedStrategy):
    """Megatron's format, written by the calling process itself."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Return Megatron's request with `_write` as its function."""
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

        # This rank has no files to write.
        if request.async_fn is None:
            return request

        return request._replace(async_fn=functools.partial(_write, transforms=[writer.transforms]))


def _write(rank: int, buckets: list[Any], results: queue.Queue, *, transforms: list[Any]) -> None:
    """Write buckets as `write_preloaded_data_multiproc` does, but without starting processes."""
    written = {}
    for number, bucket in enumerate(buckets):
        # Megatron's types require queues for processes; here the writer fills queues for threads.
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
