"""Converts the share of a GPU that a server may use into SGLang's fraction.

SGLang's fraction refers to the memory that is free at its start: it leaves (1 - fraction) of this unused.
`rollout.sglang.memory_fraction` refers to the full memory of the GPU, part of which a trainer may already
use.
"""

from __future__ import annotations

import os
import subprocess

from rlpipe.config.machine import has_gpus

MIB = 1 << 20
_LARGEST = 0.97  # limit of the fraction: kernels and CUDA graphs are allocated in addition


def server_fraction(share: float, device: str) -> float:
    """Return SGLang's fraction for a share of a GPU; the share itself if nvidia-smi does not answer.

    device: the setting, cuda or cuda:N. Raises ValueError if less than the share is free.
    """
    index = int(device.partition(":")[2] or 0)
    memory = _free_and_total(index)
    return share if memory is None else fraction_of_free(share, *memory)


def fraction_of_free(share: float, free: int, total: int) -> float:
    """Compute share * total / free, with total and free in bytes. Raises ValueError if too little is free.

    >>> fraction_of_free(0.4, free=50 << 30, total=80 << 30)
    0.64
    """
    fraction = share * total / free if free else 1.0
    if fraction > _LARGEST:
        raise ValueError(
            f"rollout.sglang.memory_fraction={share} of a GPU of {total >> 30} GiB, and {free >> 30} GiB are "
            "free: lower it or trainer.micro_batch_tokens, or end what else uses the GPU (nvidia-smi)."
        )
    return round(fraction, 3)


def _free_and_total(index: int) -> tuple[int, int] | None:
    """Read free and total bytes of a GPU; index: among the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index] if visible != [""] and index < len(visible) else str(index)
    if not has_gpus():
        return None

    query = ["--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits", f"--id={name}"]
    done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=60, check=False)
    numbers = done.stdout.split(",")
    if done.returncode or len(numbers) != 2:
        return None
    free, total = (int(number) * MIB for number in numbers)
    return free, total
