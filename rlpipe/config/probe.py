"""Settings of the probe, which measures acceptance on a fixed set of contexts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from rlpipe.config.limits import at_least


@dataclass(slots=True, kw_only=True)
class ProbeConfig:
    """Settings of the contexts that the trainer evaluates repeatedly with its newest target and draft."""

    every: int = 5
    """Steps between two readings; 0: never. For a draft with a separate directory (eagle3), the trainer's
    first rank has a second copy of the model in memory, in the dtype of the rollouts."""

    contexts: int = 256
    """Number of positions in the fixed set. A reading also evaluates as many positions of the step's
    rollouts. The positions come from full trajectories, at least three. A reading costs a forward pass over
    them (`timing_s/probe`)."""

    slope: list[float] = field(default_factory=list)
    """Change of the acceptance rate at depth 1 per nat of the target's entropy, measured by an intervention,
    with its 95% interval: [value, low, high]. The summary uses it instead of slopes that it would estimate
    from the run. []: not measured (recipes/mtp_adapt/interventional.py measures it)."""

    def __post_init__(self) -> None:
        at_least(0, self, "metrics.probe", "every", remedy="0 is never")
        remedy = "fewer leave nothing to draft; metrics.probe.every=0 switches the probe off"
        at_least(2, self, "metrics.probe", "contexts", remedy=remedy)

        # A list with a length other than 3 becomes an interval that is refused.
        value, low, high = self.slope if len(self.slope) == 3 else (0.0, 1.0, 0.0)
        if self.slope and not (isfinite(low) and low <= value <= high and isfinite(high)):
            raise ValueError(
                f"metrics.probe.slope={self.slope} is not a slope with its interval. Set [value, low, high] "
                "with low <= value <= high, e.g. [-0.03,-0.05,-0.015]; [] where none was measured."
            )
