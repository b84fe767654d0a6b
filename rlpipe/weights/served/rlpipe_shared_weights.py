"""Runs inside an SGLang server: reads the weights that `rlpipe/weights/shared.py` laid into shared memory.

From the first piece on, the server's check hashes several tensors at once. Imports nothing of rlpipe, which
the server's environment does not have.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    _hash_in_threads()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores hash: threads of a copy would wait for one another
    try:
        for _, description in named_tensors:
            model.load_weights(tensors(description))
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _hash_in_threads() -> None:
    """From here on SGLang's checker hashes the weights of a CPU in threads, each where it lies and as before.

    The hashes of one check are made at its start and forgotten at its end.
    """
    checker = sys.modules.get("sglang.srt.utils.weight_checker")
    if checker is None:  # no server
        return
    compute, hash_one = checker.WeightChecker._compute_checksum, checker._hash_tensor

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    def compute_in_threads(self: Any, *arguments: Any, **options: Any) -> Any:
        state = [tensor.data for _, tensor in self._model_state() if tensor.device.type == "cpu"]
        largest_first = {place(t): t for t in sorted(state, key=lambda t: -t.nbytes)}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # hashlib releases the interpreter's lock
            hashes = dict(zip(largest_first, pool.map(hash_one, largest_first.values()), strict=True))
        checker._hash_tensor = lambda tensor: hashes.get(place(tensor)) or hash_one(tensor)
        try:
            return compute(self, *arguments, **options)
        finally:
            checker._hash_tensor = hash_one

    checker.WeightChecker._compute_checksum = compute_in_threads
