"""Which number format a machine computes fast in; recipes for CPUs choose theirs by it.

    rollout:
      dtype: ${by_speed:bfloat16,float32}

is bfloat16 on a GPU and on CPUs that multiply it in hardware, and float32 on others. There a product in
bfloat16 takes up to eight times as long, and less time only for a single row
(`scripts/bench/number_formats.py`). config.yaml contains the chosen value.
"""

from __future__ import annotations

from rlpipe.config.machine import cpu_has_fast_bfloat16, has_gpus
from rlpipe.config.rollout import Dtype
from rlpipe.config.run import Config
from rlpipe.config.trainer import Precision


def by_speed(bfloat16: str, float32: str) -> str:
    """Return the name of the format that this machine computes fast in (the resolver `by_speed`)."""
    return bfloat16 if fast_bfloat16() else float32


def fast_bfloat16() -> bool:
    """Return whether this machine has a GPU, or a CPU on which bfloat16 is not slower than float32."""
    return has_gpus() or cpu_has_fast_bfloat16()


def slow_number_formats(config: Config) -> str:
    """Return what a launch says about settings that are slow on this CPU; empty if there are none.

    Nothing is said of a cluster that is already running: its machines may differ from this one.
    """
    slow = {
        "rollout.dtype=float32": config.rollout.dtype is Dtype.BFLOAT16,
        "trainer.precision=fp32": config.trainer.precision is Precision.BF16,
    }
    remedies = [remedy for remedy, is_slow in slow.items() if is_slow]
    if not remedies or config.cluster.address or fast_bfloat16():
        return ""
    named = " and ".join(remedies)
    return f"this CPU computes slowly in bfloat16: {named} would be faster with several answers at a time"
