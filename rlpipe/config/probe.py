"""The probe set of acceptance. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.limits import at_least


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
        at_least(0, self, "metrics.probe", "every", remedy="0 is never")
        remedy = "fewer leave nothing to draft; metrics.probe.every=0 is no probe"
        at_least(2, self, "metrics.probe", "contexts", remedy=remedy)
