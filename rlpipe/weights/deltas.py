"""Deltas: the elements in which a version differs from the version that a server has.

After a step in bf16 most elements have unchanged bits: 2% change in two steps of full training. For each
element that changes, a position (int32) in a tensor of a server's rank and a value are sent:

    held, new  --server_parts-->  tensors as a rank stores them  -->  positions and values where bits differ

SGLang's `load_weights` takes full Hugging Face tensors and cannot write into a part of a fused tensor, so
`served/rlpipe_shared_weights.py` writes elements to their positions. Bits are compared, as integers, so the
result equals a full update, and the canary compares the same fingerprints. No delta is made if a full update
is faster: 4-byte dtypes change everywhere, and a dense delta takes longer than a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rlpipe.weights.canary import DRAFT
from rlpipe.weights.fingerprint import Parts

MAX_SHARE = 0.25  # maximum size of a delta, as a share of the bytes of a full update
_INDEX = torch.int32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Elements(NamedTuple):
    """Some elements of one tensor of a server's rank. numel: number of all its elements.

    positions: [k] int32, ascending. values: [k].
    """

    name: str
    numel: int
    positions: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Delta:
    """The elements that each rank of a server writes, by role (target, draft).

    num_elements: number over all ranks and roles. num_bytes: size of positions and values.
    """

    ranks: Sequence[Mapping[str, list[Elements]]]
    num_elements: int
    num_bytes: int


def delta(held: Sequence[Mapping[str, Parts]], new: Sequence[Mapping[str, Parts]]) -> Delta | None:
    """Compute the delta between two versions; None if it is larger than `MAX_SHARE` of the bytes of `new`.

    held, new: the tensors that each rank of a server stores, by name (`canary.rank_parts`). A tensor that the
    draft shares with the target is listed with the target only.
    """
    whole = sum(part.nbytes for rank in new for parts in rank.values() for part in parts)
    ranks: list[dict[str, list[Elements]]] = []
    num_elements = num_bytes = 0

    for before, after in zip(held, new, strict=True):
        if before.keys() != after.keys():
            return None
        by_role: dict[str, list[Elements]] = {"target": [], "draft": []}
        seen: set[int] = set()
        for name, parts in after.items():
            if id(parts) in seen:
                continue
            seen.add(id(parts))

            # Count before listing positions, which take eight bytes each.
            masks = [_differing(*pair) for pair in zip(before[name], parts, strict=True)]
            count, numel = sum(int(mask.count_nonzero()) for mask in masks), sum(map(len, masks))
            num_elements += count
            num_bytes += count * (_INDEX.itemsize + parts[0].itemsize)
            if num_bytes > MAX_SHARE * whole or numel >= 2**31:
                return None
            if count:
                role = "draft" if name.startswith(DRAFT) else "target"
                by_role[role].append(Elements(name.removeprefix(DRAFT), numel, *_elements(masks, parts)))
        ranks.append(by_role)
    return Delta(ranks=ranks, num_elements=num_elements, num_bytes=num_bytes)


def _differing(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a mask [n] of where the bits of two tensors differ."""
    return _bits(held) != _bits(new)


def _elements(masks: Sequence[torch.Tensor], parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [k] int32 in the concatenated parts, and the values [k] there."""
    positions, values, first = [], [], 0
    for mask, part in zip(masks, parts, strict=True):
        at = torch.from_numpy(np.flatnonzero(mask.numpy()))  # faster than torch if few are set
        positions.append((at + first).to(_INDEX))
        values.append(part.reshape(-1)[at])
        first += len(mask)
    return torch.cat(positions), torch.cat(values)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as [n] integers with the size of its elements; copy it only if it is not contiguous."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.itemsize])
