"""Runs inside an SGLang server: loads weights from memory that another process writes.

The memory is on the host (`rlpipe/weights/shared_memory.py`) or on a GPU (`rlpipe/weights/device_memory.py`).
It contains full tensors, or elements of this rank's tensors (`rlpipe/weights/deltas.py`). After the first
bucket, a check on a CPU server hashes in threads while requests are served; the check is requested again
until the threads are done. This module does not import rlpipe, which the server's environment does not have.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch

PENDING = "hashes are being computed"  # sent instead of a tensor's name: repeat the request
CHECK = "rlpipe-check-"  # prefix of the id of a check
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Hashes = dict[tuple[Any, ...], Future[str]]
_hashing: dict[int, tuple[str, _Hashes]] = {}  # the last check of each checker, by its `id`
_mapped: dict[int, torch.Tensor] = {}  # the last two mappings of host memory, by inode
_on_gpu: dict[tuple[str, str], torch.Tensor] = {}  # the last mapping of GPU memory, by handle and generation


def tensors(description: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a bucket, as views of the mapped memory; copy them before the next bucket.

    description: the return value of `SharedBuckets.write`.
    """
    layout = json.loads(bytes(description.tolist()))
    memory = _map(layout["path"], layout["bytes"]) if "path" in layout else _map_gpu(layout)
    for entry in layout["tensors"]:
        dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
        end = entry["offset"] + shape.numel() * dtype.itemsize
        yield entry["name"], memory[entry["offset"] : end].view(dtype).view(shape)


def _map(path: str, size: int) -> torch.Tensor:
    """Map the host memory at `path`, and map it again if it grew."""
    file = Path(path).stat()
    inode = file.st_ino
    memory = _mapped.pop(inode, torch.empty(0, dtype=torch.uint8))
    if len(memory) < size:
        memory = torch.from_file(path, shared=True, size=file.st_size, dtype=torch.uint8)

    # Two blocks are read alternately; unmap older ones.
    for other in list(_mapped)[:-1]:
        del _mapped[other]
    _mapped[inode] = memory
    return memory


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def _map_gpu(layout: dict[str, Any]) -> torch.Tensor:
    """Map the GPU memory with the handle in `layout`. Raises RuntimeError if it is on another GPU."""
    key = layout["handle"], layout["generation"]
    if (memory := _on_gpu.get(key)) is None:
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if gpu != layout["gpu"]:
            raise RuntimeError(
                f"the weights are on the GPU {layout['gpu']}, and this server runs on {gpu}: set "
                "rollout.sglang.weight_transfer=auto."
            )

        # New memory may have an old handle, and a handle cannot be mapped twice at the same time.
        while _on_gpu:
            _, closed = _on_gpu.popitem()
            _driver("cuIpcCloseMemHandle", ctypes.c_uint64(closed.data_ptr()))

        pointer, lazily = ctypes.c_uint64(0), ctypes.c_uint(1)
        handle = _Handle((ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(key[0])))
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, lazily)
        interface = {
            "shape": (layout["size"],),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 3,
        }
        memory = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": interface})(), device="cuda")
        _on_gpu[key] = memory
    return memory


def _driver(function: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver in torch's context."""
    torch.cuda.synchronize()
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        raise RuntimeError(f"{function}: CUDA driver error {code}")


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket. SGLang's `--custom-weight-loader` calls this for each model that the bucket is for."""
    _hash_in_threads()
    threads = torch.get_num_threads()

    # Copy with one thread: the other cores hash, and several threads would wait for one another.
    torch.set_num_threads(1)
    try:
        for _, description in named_tensors:
            sizes = json.loads(bytes(description.tolist())).get("elements_of")
            if sizes is None:
                model.load_weights(tensors(description))
            else:
                write_elements(model, tensors(description), sizes)

        # Wait for copies, as the memory is overwritten as soon as this request is answered.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)


def write_elements(model: Any, pairs: Iterator[tuple[str, torch.Tensor]], sizes: Sequence[int]) -> None:
    """Write elements to their positions. pairs: per tensor positions [k] int32, ascending, and values [k].

    sizes: number of elements that each tensor must have. A tensor with another size is skipped, because an
    exception would end the server; the check then reports it.
    """
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    for (name, positions), (_, values), size in zip(pairs, pairs, sizes, strict=True):
        tensor = state.get(name)
        if tensor is None or tensor.dtype is not values.dtype or tensor.numel() != size:
            continue
        if not tensor.is_contiguous():
            continue
        bits = _INTEGERS[values.itemsize]
        at = positions.to(tensor.device, torch.int64)
        tensor.data.view(-1).view(bits)[at] = values.view(bits).to(tensor.device)


@functools.cache
def _hash_in_threads() -> None:
    """Make SGLang's checker hash weights on a CPU in threads, in place and with the same results.

    A check may have an id, sent as a name in its list of tensors to skip. Then the answer is
    `PENDING` until all hashes are computed, and the scheduler serves requests meanwhile. Hashes are stored
    for further requests with the same id, because target and draft on all ranks finish at different times.
    """
    checker: Any = sys.modules.get("sglang.srt.utils.weight_checker")
    if checker is None:  # not in a server
        return
    compute, hash_one = checker.WeightChecker._compute_checksum, checker._hash_tensor
    pool = ThreadPoolExecutor(torch.get_num_threads())  # hashlib releases the interpreter's lock

    def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    def compute_in_threads(self: Any, skipped: Sequence[str] | None = None, *, role: str) -> Any:
        check = next((name for name in skipped or () if name.startswith(CHECK)), "")
        before, hashes = _hashing.get(id(self), ("", {}))
        if not check or check != before:
            state = [tensor.data for _, tensor in self._model_state() if tensor.device.type == "cpu"]
            # Start with the largest, so that no thread ends long after the others.
            largest_first = {identity(t): t for t in sorted(state, key=lambda t: -t.nbytes)}
            hashes = {key: pool.submit(hash_one, t) for key, t in largest_first.items()}
            _hashing[id(self)] = check, hashes

        if check and not all(hash_.done() for hash_ in hashes.values()):
            place = self._parallelism_info(role=role).model_dump()
            return {"checksums": {PENDING: ""}, "per_gpu_checksum": "", "parallelism_info": place}

        def known(tensor: torch.Tensor) -> str:
            found = hashes.get(identity(tensor))
            return hash_one(tensor) if found is None else found.result()

        checker._hash_tensor = known
        try:
            return compute(self, skipped, role=role)
        finally:
            checker._hash_tensor = hash_one

    checker.WeightChecker._compute_checksum = compute_in_threads
