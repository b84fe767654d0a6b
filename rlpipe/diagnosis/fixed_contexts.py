"""Decomposition from the probe set: the contexts are fixed, and only target and draft change.

Owns what is possible only on fixed contexts: Eq. 16 for both rules and every depth within one run, with a
slope without drift (across the contexts of the first probe), and differences that are paired by context.
Flow: probe/step_N.jsonl -> here -> `acceptance_split`.

    D alpha = slope D H + remainder,  per context; means over contexts, errors clustered by trajectory

The slope across contexts compares *tokens* (an uncertain context with a certain one). The slope of
`decomposition` compares means over steps. The two slopes need not agree, so each is used only with the
differences of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from rlpipe.diagnosis.decomposition import LEVEL, Decomposition
from rlpipe.diagnosis.probe import ProbeTable, read_probes
from rlpipe.diagnosis.regression import clustered_error, cross_section
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Estimate

RULES = ("rejection", "target_only")


@dataclass(slots=True, kw_only=True)
class Pooled:
    """Contexts of a probe, [n] each.

    alpha: acceptance probability.
    entropy: entropy of the target, in nat.
    clusters: index of the trajectory.
    """

    alpha: np.ndarray
    entropy: np.ndarray
    clusters: np.ndarray


def pool(tables: list[ProbeTable], rule: str, depth: int | None) -> Pooled:
    """Join the contexts of several trajectories.

    Args:
        tables: one per trajectory.
        rule: column of the acceptance probability, see `RULES`.
        depth: 1, 2, ...; None: all depths together.
    Returns:
        The contexts with a known acceptance (not nan).
    """
    depths = slice(None) if depth is None else slice(depth - 1, depth)
    alphas = [table.values[rule][:, depths].ravel() for table in tables]
    entropies = [table.values["target_entropy"][:, depths].ravel() for table in tables]

    alpha = np.concatenate(alphas)
    entropy = np.concatenate(entropies)
    clusters = np.concatenate([np.full(len(alpha), index) for index, alpha in enumerate(alphas)])
    known = ~np.isnan(alpha)
    return Pooled(alpha=alpha[known], entropy=entropy[known], clusters=clusters[known])


def decompose_between(
    before: Pooled, after: Pooled, *, steps: tuple[int, int], level: float
) -> Decomposition:
    """Decompose the change between two probes of the same contexts in the same order (Eq. 16)."""
    slope = cross_section(before.alpha, before.entropy, before.clusters, level=level)

    # Contexts are paired, so that the variation between them cancels in the differences.
    change, entropy_change = after.alpha - before.alpha, after.entropy - before.entropy
    error_of_slope = abs(float(entropy_change.mean())) * slope.se

    def part(values: np.ndarray, extra_error: float) -> Estimate:
        error = clustered_error(values - values.mean(), before.clusters) / len(values)
        se = hypot(error, extra_error)
        return Estimate(value=float(values.mean()), se=se, df=slope.df, level=level)

    return Decomposition(
        early=(steps[0], steps[0]),
        window=(steps[1], steps[1]),
        slope=slope,
        entropy_change=float(entropy_change.mean()),
        total=part(change, 0.0),
        entropy=part(slope.value * entropy_change, error_of_slope),
        mismatch=part(change - slope.value * entropy_change, error_of_slope),
    )


def decompose_fixed(run: RunData, level: float = LEVEL) -> dict[tuple[str, int | None], list[Decomposition]]:
    """Decompose the changes from the first probe to every later probe.

    Returns:
        (rule, depth) -> decompositions in the order of the probes; depth None means all depths. {} for fewer
        than two probes, or fewer than 3 trajectories.
    """
    probes = [(head, tables[: head["fixed"]]) for head, tables in read_probes(run.path)]
    if len(probes) < 2 or len(probes[0][1]) < 3:
        return {}

    first_head, first_tables = probes[0]
    num_depths = first_tables[0].values["rejection"].shape[1]
    changes: dict[tuple[str, int | None], list[Decomposition]] = {}
    for rule in RULES:
        for depth in (None, *range(1, num_depths + 1)):
            before = pool(first_tables, rule, depth)
            if len(before.alpha) < 3 or not np.ptp(before.entropy):
                continue  # these contexts do not determine a slope

            changes[rule, depth] = [
                decompose_between(
                    before, pool(tables, rule, depth), steps=(first_head["step"], head["step"]), level=level
                )
                for head, tables in probes[1:]
            ]
    return changes


def rule_of(run: RunData) -> str:
    """Return the rule of `RULES` that predicts what the run's engine accepts."""
    mode = (run.settings.get("spec") or {}).get("mode")
    return "target_only" if mode == "target_only" else "rejection"
