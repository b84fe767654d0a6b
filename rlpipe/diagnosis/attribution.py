"""The change of acceptance, attributed to entropy, mismatch, contexts and staleness; parts add up exactly.

At one time, acceptance is known three ways, which differ in one thing each:

    observed   what the engine accepted: contexts it visited, versions it served then
    current    the same verify steps judged by the trainer's newest target and draft
    fixed      fixed contexts (the probe set), judged by the newest target and draft

with H the target's entropy on the visited contexts and H* on the fixed ones, both of the newest version.
Writing D for "late minus early", the sum telescopes:

    D observed = D (observed - current)                       staleness
               + slope D H                                    entropy
               + D fixed - slope D H*                         mismatch at one and the same version
               + D (current - fixed) - slope D (H - H*)       contexts

What identifies what: a verify step accepts with probability alpha whatever it was drawn from, so without
staleness observed - current is noise around 0, and with it, it is what the versions in between cost. On fixed
contexts alpha moves only because target or draft moved: what entropy leaves over there is the draft that no
longer fits its target. `contexts` is what remains: the policy visits other places, which are easier or harder
for a reason other than entropy. Without a probe set fixed = current and H* = H: three parts then, the
mismatch containing the contexts.

The order of a telescope is a convention; here each difference is between two evaluations that were made, and
the slope enters once with H and once with H*, so nothing has to be imagined.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from rlpipe.diagnosis.decomposition import LEVEL
from rlpipe.diagnosis.regression import clustered_error, detrended, error_of_mean
from rlpipe.metrics.statistics import Estimate


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Series [n], one value per probe, in order of time; see the module.

    fixed, fixed_entropy: None without a probe set. current: None where it was not measured, which stands
    for no staleness.
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
        """The four parts by name."""
        return {name: getattr(self, name) for name in ("entropy", "mismatch", "staleness", "contexts")}


def attribute(
    evaluations: Evaluations, slope: Estimate, *, early: int, window: int, level: float = LEVEL
) -> Attribution:
    """Attribute the change between the means of the first `early` and the last `window` values.

    slope: acceptance per nat, from `decomposition` (the early phase) or `cross_section`.
    Raises ValueError when the two spans overlap or hold less than 3 values.
    """
    e, n = evaluations, len(evaluations.observed)
    if min(early, window) < 3 or early + window > n:
        raise ValueError(
            f"early={early} and window={window} must be 3 or more and fit into {n} values without overlap: "
            "probe more often (metrics.probe.every), or take shorter spans."
        )
    current = e.observed if e.current is None else e.current
    fixed = current if e.fixed is None else e.fixed
    fixed_entropy = e.entropy if e.fixed_entropy is None else e.fixed_entropy
    zeros = np.zeros(n)

    def part(series: np.ndarray, entropy: np.ndarray) -> Estimate:
        """D (series - slope entropy) and its error; series and slope are independent."""
        rest = np.asarray(series, dtype=float) - slope.value * entropy
        spans = rest[:early], rest[n - window :]
        moved = entropy[n - window :].mean() - entropy[:early].mean()
        noise = hypot(*(error_of_mean(detrended(span), fitted=2) for span in spans))
        return Estimate(
            value=float(spans[1].mean() - spans[0].mean()),
            se=hypot(noise, moved * slope.se),
            df=min(slope.df, early + window - 4),
            level=level,
        )

    moved = float(e.entropy[n - window :].mean() - e.entropy[:early].mean())
    by_entropy = Estimate(value=slope.value * moved, se=abs(moved) * slope.se, df=slope.df, level=level)
    return Attribution(
        slope=slope,
        total=part(e.observed, zeros),
        entropy=by_entropy,
        mismatch=part(fixed, fixed_entropy),
        staleness=part(e.observed - current, zeros),
        contexts=part(current - fixed, e.entropy - fixed_entropy),
    )


def cross_section(
    acceptance: np.ndarray, entropy: np.ndarray, clusters: np.ndarray, level: float = LEVEL
) -> Estimate:
    """Slope of acceptance on entropy across the contexts of one probe: one version, nothing drifts.

    Least squares over contexts; the error is clustered by trajectory (CR1). Per *token*: contexts of high
    entropy against those of low, which need not equal the slope between steps. acceptance, entropy: [n].
    clusters: [n] labels. Raises ValueError for less than 3 clusters, or equal entropies.
    """
    groups = len(np.unique(clusters))
    centred = entropy - entropy.mean()
    power = float(centred @ centred)
    if groups < 3 or power == 0:
        raise ValueError(
            f"a slope across contexts needs 3 trajectories whose entropy varies, got {groups}: raise "
            "metrics.probe.contexts."
        )
    value = float(centred @ acceptance) / power
    scores = centred * (acceptance - acceptance.mean() - value * centred)
    se = clustered_error(scores, clusters) / power
    return Estimate(value=value, se=se, df=groups - 1, level=level)
