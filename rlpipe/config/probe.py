"""The probe set of acceptance. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ProbeConfig:
    """Contexts that the trainer reads again and again with its newest target and draft.

    every: steps between two readings; 0 never. Only runs that draft with an MTP layer are probed.
    contexts: positions of the fixed set, and as many of the step's own rollouts besides, in whole
    trajectories (three at least); the cost of a reading is a forward pass over them (`timing_s/probe`).
    """

    every: int = 5
    contexts: int = 256

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"metrics.probe.every={self.every} is negative. Set a number of steps, or 0.")
        if self.contexts < 2:
            raise ValueError(
                f"metrics.probe.contexts={self.contexts} leaves nothing to draft. Set at least 2, or "
                "metrics.probe.every=0 for no probe."
            )
