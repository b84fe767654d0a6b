"""Estimates acceptance on a set of prompts, and differences, with standard errors clustered by prompt.

Owns the statistics; generates nothing. Every figure is a ratio of sums over prompts, r = sum_i N_i / sum_i
D_i. Verify steps of one prompt are correlated and prompts are not, so the error is computed from the G
prompts,

    se(r)^2 = G / (G - 1) * sum_i ((N_i - r D_i) / sum_j D_j)^2

(the linearised ratio with the CR1 correction; with one verify step per prompt it is sd / sqrt(G)). Two drafts
on the same prompts are compared prompt by prompt, by the differences of their linearised terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import fsum, nan
from typing import Any, Protocol

from rlpipe.metrics.statistics import Estimate, cr1_error
from rlpipe.types import SpecCounts, Trajectory, TrajectoryStatus

RATE, LENGTH, TOKENS = "acceptance_rate", "acceptance_length", "tokens_per_step"


@dataclass(slots=True, kw_only=True)
class PromptCounts:
    """An engine's counts over the attempts at one prompt.

    spec: counts of drafts. emitted: tokens that verify steps emitted: all sampled tokens except the first of
    each turn, which the prefill emits.
    """

    spec: SpecCounts = field(default_factory=SpecCounts)
    emitted: int = 0

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> PromptCounts:
        """Make an object from the output of `dataclasses.asdict`."""
        return cls(spec=SpecCounts(**item["spec"]), emitted=item["emitted"])

    def fraction(self, figure: str) -> tuple[float, float]:
        """Return numerator and denominator of a figure; see `figures`.

        >>> spec = SpecCounts(drafted=[4], accepted=[3], verify_steps=4, proposed=4)
        >>> PromptCounts(spec=spec).fraction(RATE)
        (3, 4)
        """
        spec = self.spec
        if figure == RATE:
            return sum(spec.accepted), spec.proposed
        if figure == LENGTH:
            return sum(spec.accepted) + spec.verify_steps, spec.verify_steps
        if figure == TOKENS:
            return self.emitted, spec.verify_steps

        depth = int(figure.removeprefix(f"{RATE}/depth_"))
        return (spec.accepted[depth - 1], spec.drafted[depth - 1]) if depth <= len(spec.drafted) else (0, 0)


@dataclass(slots=True, kw_only=True)
class ExpectedCounts:
    """Expected counts of an engine over the attempts at one prompt, given the tokens it emits.

    drafted, accepted: by depth, as in `SpecCounts`, but only for drafts within turns. verify_steps: number of
    verify steps. emitted: see `PromptCounts`.
    """

    drafted: list[float]
    accepted: list[float]
    verify_steps: float = 0.0
    emitted: float = 0.0

    def fraction(self, figure: str) -> tuple[float, float]:
        """Return numerator and denominator of a figure; see `expected_figures`."""
        if figure == TOKENS:
            return self.emitted, self.verify_steps
        depth = int(figure.removeprefix(f"{RATE}/depth_"))
        return self.accepted[depth - 1], self.drafted[depth - 1]


class HasFractions(Protocol):
    """The counts of one prompt, observed or expected."""

    def fraction(self, figure: str) -> tuple[float, float]:
        """Return numerator and denominator of a figure."""
        ...


Counts = Mapping[str, PromptCounts]  # by instance_id
AnyCounts = Mapping[str, HasFractions]


def figures(gamma: int) -> list[str]:
    """List the names of all figures.

    They are the acceptance rate of drafted tokens, the acceptance length (with drafts beyond a turn's end),
    the tokens per step (only within turns, which determines the speed-up), and the rate by depth, given that
    the depth before was accepted.

    >>> figures(1)
    ['acceptance_rate', 'acceptance_length', 'tokens_per_step', 'acceptance_rate/depth_1']
    """
    return [RATE, LENGTH, TOKENS, *(f"{RATE}/depth_{k}" for k in range(1, gamma + 1))]


def expected_figures(gamma: int) -> list[str]:
    """List the figures that have an expected value; these exclude drafts beyond the end of a turn.

    >>> expected_figures(2)
    ['tokens_per_step', 'acceptance_rate/depth_1', 'acceptance_rate/depth_2']
    """
    return [TOKENS, *(f"{RATE}/depth_{k}" for k in range(1, gamma + 1))]


def count(trajectories: Iterable[Trajectory]) -> dict[str, PromptCounts]:
    """Add up counts by instance, without trajectories that are masked or have no verify step."""
    by_instance: dict[str, PromptCounts] = {}
    for trajectory in trajectories:
        if trajectory.status is not TrajectoryStatus.COMPLETE or not trajectory.spec.verify_steps:
            continue

        counts = by_instance.setdefault(trajectory.instance_id, PromptCounts())
        counts.spec.add(trajectory.spec)
        counts.emitted += trajectory.response_length - trajectory.num_turns
    return by_instance


def estimate(counts: AnyCounts, figure: str) -> Estimate:
    """Estimate a figure over all prompts."""
    value, terms = _linearised([counts[name].fraction(figure) for name in sorted(counts)])
    return _estimate(value, terms)


def difference(after: AnyCounts, before: AnyCounts, figure: str) -> Estimate:
    """Estimate the change of a figure, after minus before, paired over the prompts that both have."""
    common = sorted(after.keys() & before.keys())
    a, a_terms = _linearised([after[name].fraction(figure) for name in common])
    b, b_terms = _linearised([before[name].fraction(figure) for name in common])

    terms = [x - y for x, y in zip(a_terms, b_terms, strict=True)]
    return _estimate(a - b, terms)


def pooled(several: Iterable[Counts]) -> dict[str, PromptCounts]:
    """Add the counts of several runs (seeds) by prompt, so that prompts remain the clusters."""
    totals: dict[str, PromptCounts] = {}
    for counts in several:
        for name, prompt in counts.items():
            total = totals.setdefault(name, PromptCounts())
            total.spec.add(prompt.spec)
            total.emitted += prompt.emitted
    return totals


def to_json(counts: Counts) -> dict[str, Any]:
    """Return the counts as plain data, for `counts_from_json`."""
    return {name: asdict(prompt) for name, prompt in counts.items()}


def counts_from_json(data: Mapping[str, Any]) -> dict[str, PromptCounts]:
    """Return the counts from data that `to_json` made."""
    return {name: PromptCounts.from_json(item) for name, item in data.items()}


def _linearised(fractions: list[tuple[float, float]]) -> tuple[float, list[float]]:
    """Compute the ratio of sums, and each prompt's contribution to its deviation."""
    weight = fsum(d for _, d in fractions)
    if not weight:
        return nan, [nan] * len(fractions)

    value = fsum(n for n, _ in fractions) / weight
    return value, [(n - value * d) / weight for n, d in fractions]


def _estimate(value: float, terms: list[float]) -> Estimate:
    """Make an estimate with its clustered error. terms: linearised terms of independent prompts."""
    return Estimate(value=value, se=cr1_error(fsum(t * t for t in terms), len(terms)), df=len(terms) - 1)
