"""Decomposition and attribution from the probe set: contexts stay, target and draft move.

Owns what only fixed contexts allow: Eq. 16 for both rules and every depth within one run, with a slope that
nothing has drifted into (across the contexts of the first probe), differences paired context by context, and
the four-part attribution of what the engine accepted. Flow: probe/step_N.jsonl -> here -> report.

    D alpha = slope D H + rest,  per context; means over contexts, errors clustered by trajectory

The slope across contexts is per *token* (an uncertain place against a sure one); the slope between steps of
`decomposition` is of means over steps. They need not agree: each is used with its own differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from rlpipe.diagnosis.attribution import Attribution, Evaluations, attribute, cross_section
from rlpipe.diagnosis.decomposition import LEVEL, Decomposition
from rlpipe.diagnosis.probe import ProbeTable, read_probes
from rlpipe.diagnosis.regression import clustered_error
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Estimate

RULES = ("rejection", "target_only")


@dataclass(slots=True, kw_only=True)
class Pooled:
    """Contexts of a probe in one line each: alpha, entropy [n]; clusters [n], the trajectory of each."""

    alpha: np.ndarray
    entropy: np.ndarray
    clusters: np.ndarray


def pool(tables: list[ProbeTable], rule: str, depth: int | None) -> Pooled:
    """Contexts of one depth (1, 2, ...), or of all depths together (None); nan ones are left out."""
    columns = slice(None) if depth is None else slice(depth - 1, depth)
    parts = [
        (t.values[rule][:, columns], t.values["target_entropy"][:, columns], i) for i, t in enumerate(tables)
    ]
    alpha = np.concatenate([a.ravel() for a, _, _ in parts])
    entropy = np.concatenate([h.ravel() for _, h, _ in parts])
    clusters = np.concatenate([np.full(a.size, i) for a, _, i in parts])
    seen = ~np.isnan(alpha)
    return Pooled(alpha=alpha[seen], entropy=entropy[seen], clusters=clusters[seen])


def decompose_between(before: Pooled, after: Pooled, steps: tuple[int, int], level: float) -> Decomposition:
    """Eq. 16 between two probes of the same contexts, in the same order."""
    slope = cross_section(before.alpha, before.entropy, before.clusters, level)
    change, moved = after.alpha - before.alpha, after.entropy - before.entropy
    of_slope = abs(float(moved.mean())) * slope.se

    def part(values: np.ndarray, extra: float) -> Estimate:
        error = hypot(clustered_error(values - values.mean(), before.clusters) / len(values), extra)
        return Estimate(value=float(values.mean()), se=error, df=slope.df, level=level)

    return Decomposition(
        early=(steps[0], steps[0]),
        window=(steps[1], steps[1]),
        slope=slope,
        entropy_change=float(moved.mean()),
        total=part(change, 0.0),
        entropy=part(slope.value * moved, of_slope),
        mismatch=part(change - slope.value * moved, of_slope),
    )


def decompose_fixed(run: RunData, level: float = LEVEL) -> dict[tuple[str, int | None], list[Decomposition]]:
    """By (rule, depth; None: all depths): the change of every later probe against the first.

    {} below two probes, or for a set of fewer than 3 trajectories.
    """
    probes = [(head, tables[: head["fixed"]]) for head, tables in read_probes(run.path)]
    if len(probes) < 2 or len(probes[0][1]) < 3:
        return {}
    (first, start), depths = probes[0], probes[0][1][0].values["rejection"].shape[1]
    found: dict[tuple[str, int | None], list[Decomposition]] = {}
    for rule in RULES:
        for depth in (None, *range(1, depths + 1)):
            before = pool(start, rule, depth)
            if len(before.alpha) < 3 or not np.ptp(before.entropy):
                continue
            found[rule, depth] = [
                decompose_between(before, pool(tables, rule, depth), (first["step"], head["step"]), level)
                for head, tables in probes[1:]
            ]
    return found


def rule_of(run: RunData) -> str:
    """The rule of `RULES` that predicts what the run's engine accepts."""
    mode = (run.settings.get("spec") or {}).get("mode")
    return "target_only" if mode == "target_only" else "rejection"


def probe_series(run: RunData, level: float = LEVEL) -> tuple[Evaluations, Estimate] | None:
    """Every probe at depth 1 in order, and the slope across the contexts of the first; None without any.

    Only of probes with recorded drafts (spec.mode rejection or target_only).
    """
    rule, rows = rule_of(run), []
    for head, tables in read_probes(run.path):
        record = next((r for r in run.records if r["training/global_step"] == head["step"]), {})
        seen = [record.get(f"probe/visited/{name}") for name in ("observed_rate", "current_rate")]
        visited = tables[head["fixed"] :]
        if None in seen or not visited or head["fixed"] < 3:
            continue
        fixed = pool(tables[: head["fixed"]], rule, 1)
        rows.append((*seen, pool(visited, rule, 1).entropy.mean(), fixed.alpha.mean(), fixed.entropy.mean()))
        if len(rows) == 1:
            slope = cross_section(fixed.alpha, fixed.entropy, fixed.clusters, level)
    if not rows:
        return None
    names = ("observed", "current", "entropy", "fixed", "fixed_entropy")
    return Evaluations(**dict(zip(names, np.array(rows, dtype=float).T, strict=True))), slope


def attribute_run(run: RunData, *, window: int = 3, level: float = LEVEL) -> Attribution | None:
    """The change of what the engine kept at depth 1, between the first and the last `window` probes.

    None below 2 * window probes with recorded drafts.
    """
    found = probe_series(run, level)
    if found is None or len(found[0].observed) < max(2 * window, 6):
        return None
    return attribute(*found, early=window, window=window, level=level)
