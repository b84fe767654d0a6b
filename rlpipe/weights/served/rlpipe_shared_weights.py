"""Runs inside an SGLang server: reads the weights that another process laid into memory which both map.

Memory of the host (`rlpipe/weights/shared_memory.py`) or of the GPU (`rlpipe/weights/device_memory.py`). From
the first piece on, the check of a server on a CPU hashes several tensors at once. Imports nothing of rlpipe,
which the server's environment does not have.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_mapped: dict[int | str, torch.Tensor] = {}  # by inode or handle: two buckets, whose pages are found again


def tensors(description: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a bucket, as views of the mapped memory; copy before the next is asked for.

    description: what `SharedBuckets.write` returned.
    """
    said = json.loads(bytes(description.tolist()))
    memory = _map(said["path"], said["bytes"]) if "path" in said else _map_gpu(said)
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
    return _keep(inode, memory)


def _keep(key: int | str, memory: torch.Tensor) -> torch.Tensor:
    """Remember it and the last before it."""
    for other in list(_mapped)[:-1]:
        gone = _mapped.pop(other)
        if gone.is_cuda:
            _driver("cuIpcCloseMemHandle", ctypes.c_uint64(gone.data_ptr()))
    _mapped[key] = memory
    return memory


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def _map_gpu(said: dict[str, Any]) -> torch.Tensor:
    """The GPU's memory with this handle. Raises RuntimeError where it is another GPU's."""
    key = said["handle"]
    if (memory := _mapped.pop(key, None)) is None:
        ours = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if ours != said["gpu"]:
            raise RuntimeError(
                f"the weights lie on the GPU {said['gpu']}, and this server runs on {ours}: set "
                "rollout.sglang.weight_transfer=auto."
            )
        pointer, lazily = ctypes.c_uint64(0), ctypes.c_uint(1)
        handle = _Handle((ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(key)))
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, lazily)
        place = {"shape": (said["size"],), "data": (pointer.value, False)}
        interface = {"typestr": "|u1", "version": 3, **place}
        memory = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": interface})(), device="cuda")
    return _keep(key, memory)


def _driver(function: str, *arguments: Any) -> None:
    """Call CUDA's driver in torch's context."""
    torch.cuda.synchronize()
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        raise RuntimeError(f"{function}: CUDA driver error {code}")


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `--custom-weight-loader`: called for each model that a piece is for."""
    _hash_in_threads()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores hash: threads of a copy would wait for one another
    try:
        for _, description in named_tensors:
            model.load_weights(tensors(description))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the memory is written over once we have answered
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
