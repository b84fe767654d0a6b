"""Detects GPUs of this machine, and whether its CPU computes fast in bfloat16."""

from __future__ import annotations

import platform
import shutil
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")

# With one of these sets of instructions, oneDNN, torch's library of products, computes them fast in bfloat16.
_FAST = {"x86_64": {"avx512_bf16", "amx_bf16"}, "aarch64": {"bf16"}}
_KERNELS = {"x86_64": {"avx512bw"}}  # what the embedded engine's own kernels in bfloat16 need


def has_gpus() -> bool:
    """Return whether this machine has NVIDIA's driver for GPUs, that is, the program `nvidia-smi`."""
    return shutil.which("nvidia-smi") is not None


def cpu_has_fast_bfloat16() -> bool:
    """Return whether the CPU's instructions include those for fast products in bfloat16.

    False for an operating system other than Linux, which does not list them.
    """
    return bool(_instructions() & _FAST.get(platform.machine(), set()))


def cpu_decodes_fast_in_bfloat16() -> bool:
    """Return whether rollouts of the embedded engine in bfloat16 are faster than in float32 on this CPU."""
    return cpu_has_fast_bfloat16() or bool(_instructions() & _KERNELS.get(platform.machine(), set()))


@cache
def _instructions() -> set[str]:
    """Return the CPU's sets of instructions as Linux lists them."""
    if not _CPU_INFO.exists():
        return set()
    lines = _CPU_INFO.read_text().splitlines()
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
