"""Checkpoints of the distributed optimizer where each rank writes and reads only its own share.

Megatron's `fully_reshardable` format names every state (master weight, two moments) after its parameter, so a
checkpoint may be loaded with other tp, pp, ep and dp. But Megatron's save gathers the full state on every
rank: 12 bytes a parameter on the host and 4 on the GPU. A rank's share is a range of the flattened parameter.
Here the share is described as blocks in the parameter's shape instead. The files contain the same tensors
under the same names.

    range [start, stop) of a parameter -> pieces of the model's checkpoint that it overlaps -> blocks -> files
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import KEEP_VARS_HINT
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


@contextmanager
def own_shares(chained: ChainedOptimizer) -> Iterator[None]:
    """Make distributed optimizers describe and load this rank's shares instead of full tensors."""
    sharded = [o for o in chained.chained_optimizers if isinstance(o, DistributedOptimizer)]

    # Attributes of the instance hide Megatron's methods.
    for optimizer in sharded:
        vars(optimizer)["sharded_param_state_fully_reshardable"] = partial(_describe, optimizer)
        vars(optimizer)["load_parameter_state_from_fully_reshardable"] = partial(_load, optimizer)
    try:
        yield
    finally:
        for optimizer in sharded:
            del vars(optimizer)["sharded_param_state_fully_reshardable"]
            del vars(optimizer)["load_parameter_state_from_fully_reshardable"]


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """Divide a range of a flattened array into blocks of the array, in their order.

    >>> list(blocks((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return

    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the full rows are first..last - 1

    # The range is within one row.
    if first > last:
        yield from _within(shape, last, start - last * row, stop - last * row)
        return

    if start < first * row:
        yield from _within(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop > last * row:
        yield from _within(shape, last, 0, stop - last * row)


def _within(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Block]:
    """Divide a range of one row of the array."""
    for offset, size in blocks(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def _describe(
    optimizer: DistributedOptimizer,
    model_state: dict[str, Any],
    is_loading: bool = False,  # noqa: FBT001, FBT002  # Megatron's signature
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Return the blocks of this rank's states, by index of the parameter and name of the state.

    The blocks are views of the optimizer's tensors. There is no communication.
    """
    described, _ = extract_sharded_tensors_and_factories(model_state)
    by_parameter = {id(entry.data): entry for entry in nested_values(described)}

    blocks = {}
    for number, (parameter, start, stop) in enumerate(_shares(optimizer)):
        if id(parameter) not in by_parameter:
            raise ValueError(f"a parameter is missing in the model's checkpoint. {KEEP_VARS_HINT}")
        pieces = _pieces(by_parameter[id(parameter)], parameter)

        states = optimizer._get_main_param_and_optimizer_states(parameter)
        blocks[number] = {
            name: [
                block for at, piece in pieces for block in _blocks_of(piece, name, state, (start, stop), at)
            ]
            for name, state in states.items()
            if name != "step"  # Megatron stores it once
        }
    return blocks


def _shares(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """List the parameters that this rank has a share of, with the range of each share."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _pieces(
    entry: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter
) -> list[tuple[int, ShardedTensor]]:
    """List the tensors that a parameter is stored as, in order, with their offsets in the parameter.

    Some parameters are stored as several tensors, such as the two matrices of a gated MLP.
    """
    if isinstance(entry, ShardedTensor):
        return [(0, entry)]

    # The pieces are views of the parameter, so their addresses give their offsets.
    pieces = []
    for piece in nested_values(entry.build()):
        assert piece.data.is_contiguous(), f"{piece.key} is not a range of its parameter"
        place = (piece.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        pieces.append((place, piece))
    pieces.sort(key=lambda placed: placed[0])

    sizes = [piece.data.numel() for _, piece in pieces]
    assert [place for place, _ in pieces] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert sum(sizes) == parameter.numel()
    return pieces


def _blocks_of(
    piece: ShardedTensor, name: str, state: torch.Tensor, share: tuple[int, int], place: int
) -> Iterator[ShardedTensor]:
    """Describe the part of a state that belongs to a stored tensor.

    state: [stop - start], for the range `share` of the parameter. place: offset of `piece` in the parameter.
    """
    start, stop = share
    size = prod(piece.local_shape)
    first, last = max(start, place), min(stop, place + size)

    taken = first - start
    for offset, shape in blocks(piece.local_shape, first - place, last - place):
        count = prod(shape)
        leading = (1,) * piece.prepend_axis_num
        within = (0,) * piece.prepend_axis_num + offset
        yield replace(
            piece,
            key=f"optimizer.state.{name}.{piece.key}",
            data=state.detach()[taken : taken + count].view(leading + shape),
            dtype=state.dtype,
            local_shape=leading + shape,
            global_offset=tuple(a + b for a, b in zip(piece.global_offset, within, strict=True)),
            axis_fragmentations=None,  # the ranges of the ranks do not form a regular grid
            replica_id=(
                *cast("tuple[int, ...]", piece.replica_id)[:2],
                0,
            ),  # each data parallel rank has another share
            prepend_axis_num=0,
        )
        taken += count


@torch.no_grad()
def _load(optimizer: DistributedOptimizer, loaded: dict[int, dict[str, list[torch.Tensor]]]) -> None:
    """Set the states of this rank's shares from the blocks that were read."""
    for number, (parameter, _, _) in enumerate(_shares(optimizer)):
        states = {name: torch.cat([b.flatten() for b in read]) for name, read in loaded[number].items()}
        optimizer._set_main_param_and_optimizer_states(parameter, states)
