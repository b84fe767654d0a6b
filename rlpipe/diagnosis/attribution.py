"""The change of acceptance, attributed to entropy, mismatch, contexts and staleness; parts add up exactly.

At one time, acceptance is known in three ways, which differ in one thing each:

    observed   what the engine accepted: contexts it visited, versions it served then
    current    the same verify steps scored by the trainer's newest target and draft
    fixed      fixed contexts (the probe set), scored by the newest target and draft

with H the target's entropy on the visited contexts and H* on the fixed ones, both of the newest version.
Writing D for "late minus early", the sum telescopes:

    D observed = D (observed - current)                       staleness
               + slope D H                                    entropy
               + D fixed - slope D H*                         mismatch at one and the same version
               + D (current - fixed) - slope D (H - H*)       contexts

What identifies what: a verify step accepts with probability alpha whatever its draft token was sampled from,
so without staleness observed - current is noise around 0, and with it, it is the cost of the versions in
between. On fixed contexts alpha moves only because target or draft moved: the part that entropy does not
explain is the draft that no longer fits its target. `contexts` is the remainder: the policy visits other
contexts, which are easier or harder for a reason other than entropy. Without a probe set fixed = current and
H* = H: three parts then, the mismatch containing the contexts.

The order of a telescope is a convention; here each difference is between two evaluations that were made, and
the slope enters once with H and once with H*, so no counterfactual has to be assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from rlpipe.diagnosis.decomposition import LEVEL
from rlpipe.diagnosis.regression import detrended, error_of_mean
from rlpipe.metrics.statistics import Estimate


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Acceptance rates and entropies of the module's docstring, [n] each, a value per probe in time order.

    fixed, fixed_entropy: None without a probe set.
    current: None where it was not measured; then there is no staleness.
    """

    observed: np.ndarray
    entropy: np.ndarray
    current: np.ndarray | None = None
    fixed: np.ndarray | None = None
    fixed_entropy: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.observed)
        for name in ("entropy", "current", "fixed", "fixed_entropy"):
            series = getattr(self, name)
            if series is not None and len(series) != n:
                raise ValueError(f"{name} has {len(series)} values and observed {n}: give one per probe.")
        if (self.fixed is None) != (self.fixed_entropy is None):
            raise ValueError("fixed and fixed_entropy are of the same contexts: give both or neither.")


@dataclass(slots=True, kw_only=True)
class Attribution:
    """total = entropy + mismatch + staleness + contexts, to rounding. Errors of the parts are correlated."""

    slope: Estimate
    total: Estimate
    entropy: Estimate
    mismatch: Estimate
    staleness: Estimate
    contexts: Estimate

    def parts(self) -> dict[str, Estimate]:
        """Return the four parts by name."""
        return {name: getattr(self, name) for name in ("entropy", "mismatch", "staleness", "contexts")}


def attribute(
    evaluations: Evaluations, slope: Estimate, *, early: int, window: int, level: float = LEVEL
) -> Attribution:
    """Attribute the change between the means of the first `early` and the last `window` values.

    Args:
        evaluations: of n probes.
        slope: acceptance per nat, from `decomposition` (the early phase) or `regression.cross_section`.
        early, window: 3 or more, at most n together.
        level: of the intervals.
    Raises:
        ValueError: when the two spans overlap or are shorter than 3 values.
    """
    observed, entropy, n = evaluations.observed, evaluations.entropy, len(evaluations.observed)
    if min(early, window) < 3 or early + window > n:
        raise ValueError(
            f"early={early} and window={window} must be 3 or more and fit into {n} values without overlap: "
            "probe more often (metrics.probe.every), or take shorter spans."
        )

    # An evaluation that was not made is replaced by the nearest one: its part of the telescope is then 0.
    current = observed if evaluations.current is None else evaluations.current
    fixed = current if evaluations.fixed is None else evaluations.fixed
    fixed_entropy = entropy if evaluations.fixed_entropy is None else evaluations.fixed_entropy
    zeros = np.zeros(n)

    def part(series: np.ndarray, part_entropy: np.ndarray) -> Estimate:
        """Return D (series - slope part_entropy) and its error; series and slope are independent."""
        remainder = np.asarray(series, dtype=float) - slope.value * part_entropy
        spans = remainder[:early], remainder[n - window :]
        entropy_change = part_entropy[n - window :].mean() - part_entropy[:early].mean()
        error_of_means = hypot(*(error_of_mean(detrended(span), fitted=2) for span in spans))
        return Estimate(
            value=float(spans[1].mean() - spans[0].mean()),
            se=hypot(error_of_means, entropy_change * slope.se),
            df=min(slope.df, early + window - 4),
            level=level,
        )

    change = float(entropy[n - window :].mean() - entropy[:early].mean())
    return Attribution(
        slope=slope,
        total=part(observed, zeros),
        entropy=Estimate(value=slope.value * change, se=abs(change) * slope.se, df=slope.df, level=level),
        mismatch=part(fixed, fixed_entropy),
        staleness=part(observed - current, zeros),
        contexts=part(current - fixed, entropy - fixed_entropy),
    )
