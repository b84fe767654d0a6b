"""Detects GPUs of this machine, and whether its CPU computes fast in bfloat16."""

from __future__ import annotations

import platform
import shutil
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")

# oneDNN, torch's library of products, has fast bfloat16 kernels for these sets of instructions.
_FAST = {"x86_64": "avx512bw", "aarch64": "bf16"}


def has_gpus() -> bool:
    """Return whether this machine has NVIDIA's driver for GPUs, that is, the program `nvidia-smi`."""
    return shutil.which("nvidia-smi") is not None


@cache
def cpu_has_fast_bfloat16() -> bool:
    """Return whether the CPU's instructions include those for fast products in bfloat16.

    False for an operating system other than Linux, which does not list them.
    """
    wanted = _FAST.get(platform.machine())
    if wanted is None or not _CPU_INFO.exists():
        return False
    lines = _CPU_INFO.read_text().splitlines()
    return any(wanted in line.split() for line in lines if line.lower().startswith(("flags", "features")))
