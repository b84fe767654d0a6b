"""Which number format a machine computes fast in; recipes for CPUs choose theirs by it.

    rollout:
      dtype: ${by_speed:bfloat16,float32}

is bfloat16 on a GPU and on CPUs that multiply it in hardware, and float32 on others. There products of
hundreds of rows, as in a training step, take four to eight times as long in bfloat16
(`scripts/bench/number_formats.py`). config.yaml contains the chosen value.
"""

from __future__ import annotations

from rlpipe.config.machine import cpu_decodes_fast_in_bfloat16, cpu_has_fast_bfloat16, has_gpus
from rlpipe.config.rollout import Dtype
from rlpipe.config.run import Config
from rlpipe.config.trainer import Precision


def by_speed(bfloat16: str, float32: str) -> str:
    """Return the name of the format that this machine computes fast in (the resolver `by_speed`)."""
    return bfloat16 if fast_bfloat16() else float32


def fast_bfloat16() -> bool:
    """Return whether this machine has a GPU, or a CPU on which bfloat16 is not slower than float32."""
    return has_gpus() or cpu_has_fast_bfloat16()


def number_format_advice(config: Config) -> list[str]:
    """Return what a launch says about number formats: that they are slow on this CPU, or are not the same.

    Nothing is said of the speed on a cluster that is already running: its machines may differ from this one.
    """
    bfloat16_rollouts = config.rollout.dtype is Dtype.BFLOAT16
    bfloat16_trainer = config.trainer.precision is Precision.BF16
    advice = []

    slow = {
        "rollout.dtype=float32": bfloat16_rollouts and not cpu_decodes_fast_in_bfloat16(),
        "trainer.precision=fp32": bfloat16_trainer,
    }
    named = " and ".join(remedy for remedy, is_slow in slow.items() if is_slow)
    if named and not config.cluster.address and not fast_bfloat16():
        advice.append(f"this CPU computes slowly in bfloat16: {named} would be faster")

    # With a learning rate of 3e-5, nine of ten weights of SmolLM2 are served unchanged after five steps.
    if bfloat16_rollouts and not bfloat16_trainer:
        advice.append(
            "rollout.dtype=bfloat16 with trainer.precision=fp32: engines round the trainer's weights, so "
            "they miss smaller updates, and rollouts are off-policy. Set both to the same format"
        )
    return advice
