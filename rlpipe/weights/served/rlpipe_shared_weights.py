"""Runs inside an SGLang server: reads the weights that `rlpipe/weights/shared.py` laid into shared memory.

Imports nothing of rlpipe, which the server's environment does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_mapped: dict[int, torch.Tensor] = {}  # by inode: the two buckets, whose pages are found again


def tensors(description: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a bucket, as views of the mapped memory; copy before the next is asked for.

    description: what `SharedBuckets.lay` returned.
    """
    said = json.loads(bytes(description.tolist()))
    memory = _map(said["path"], said["bytes"])
    for laid in said["tensors"]:
        dtype, shape = getattr(torch, laid["dtype"]), torch.Size(laid["shape"])
        end = laid["offset"] + shape.numel() * dtype.itemsize
        yield laid["name"], memory[laid["offset"] : end].view(dtype).view(shape)


def _map(path: str, size: int) -> torch.Tensor:
    file = Path(path).stat()
    inode = file.st_ino
    memory = _mapped.pop(inode, torch.empty(0, dtype=torch.uint8))
    if len(memory) < size:
        memory = torch.from_file(path, shared=True, size=file.st_size, dtype=torch.uint8)
    for other in list(_mapped)[:-1]:
        del _mapped[other]
    _mapped[inode] = memory
    return memory


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `--custom-weight-loader`: called for each model that a piece is for."""
    for _, description in named_tensors:
        model.load_weights(tensors(description))
