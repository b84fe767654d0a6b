"""The components of the loop that a run executes: rollout, training, or both. Imports no torch."""

from __future__ import annotations

from rlpipe.config.choice import Choice


class RunMode(Choice):
    """The components that run (setting `run.half`)."""

    BOTH = "both"
    ROLLOUT = "rollout"  # generate and score batches with fixed weights, and dump them (no trainer)
    TRAIN = "train"  # train on the batches of a dump, in their order (no engines)

    @property
    def generates(self) -> bool:
        """Whether engines and environments run."""
        return self is not RunMode.TRAIN

    @property
    def trains(self) -> bool:
        """Whether a trainer runs."""
        return self is not RunMode.ROLLOUT
