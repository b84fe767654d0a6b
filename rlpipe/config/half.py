"""Which half of the loop runs. Imports no torch."""

from __future__ import annotations

from rlpipe.config.choice import Choice


class Half(Choice):
    """Which half of the loop runs."""

    BOTH = "both"
    ROLLOUT = "rollout"  # batches are played and scored with fixed weights and dumped; no trainer is built
    TRAIN = "train"  # the batches of a dump are trained on, in its order; no engine is built

    @property
    def rolls(self) -> bool:
        """Whether engines and environments run."""
        return self is not Half.TRAIN

    @property
    def trains(self) -> bool:
        """Whether a trainer runs."""
        return self is not Half.ROLLOUT
