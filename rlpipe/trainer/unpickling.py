"""Reads a checkpoint without executing code that it may contain.

Megatron's format describes its tensors in a pickle, `.metadata`; torch unpickles this file, and also objects
among the tensors. Here `.metadata` is first read by a reader that accepts only names of the format, and the
objects are read with `weights_only`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_FORMAT = "torch.distributed.checkpoint"
_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
    *((f"{_FORMAT}.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    *(
        (f"{_FORMAT}.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _Reader(pickle.Unpickler):
    """An unpickler that raises ValueError for names outside of the format."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of the format."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no trainer writes there")


@contextmanager
def nothing_executed(directory: Path) -> Iterator[None]:
    """Make loading a checkpoint safe within the context.

    Raises ValueError when its `.metadata` names a class or function outside of the format.
    """
    # A damaged pickle can raise any exception.
    with (directory / ".metadata").open("rb") as file:
        try:
            _Reader(file).load()
        except Exception as error:
            raise ValueError(f"{directory / '.metadata'} cannot be read: {error}.") from error

    # torch.load obeys this variable even if its caller passes weights_only=False.
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCE]
        if before is not None:
            os.environ[_FORCE] = before
