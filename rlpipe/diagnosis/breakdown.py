"""Acceptance of a run, cut every way: from recorded rollouts and probes, after the fact.

Owns the cuts; what is recorded and in which form is docs/run_directory.md. Flow:

    rollouts/step_N.jsonl -> `judged` (one line per draft that was judged) -> `acceptance_by` depth, position,
                             turn, token class, entropy; `lengths` (predicted against observed)
    probe/step_N.jsonl    -> `boundary` (rejection against target-only, Bebop Fig. 13)
    metrics.jsonl         -> `distributions` (Fig. 10, 11), `speedups`, `entropy_slope` (Fig. 8)

Rates are sums over sums; their errors are clustered by trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import Any

import numpy as np

from rlpipe.config.spec import SpecConfig
from rlpipe.diagnosis.decomposition import ENTROPY, LENGTH, paired
from rlpipe.diagnosis.probe import COLUMNS, ProbeTable
from rlpipe.diagnosis.regression import clustered_error, robust_slope
from rlpipe.diagnosis.token_class import sampled_spans, token_classes
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Estimate, cr1_error

POSITION_BUCKET = 32  # sampled tokens
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0)  # nat; the last bin is open
SHOWN_DEPTH = 1


@dataclass(slots=True, kw_only=True)
class VerifiedDrafts:
    """Drafts that verify steps judged, one entry each: depths 1..num_accepted + 1 of every step.

    trajectory: index of the record. depth: 1, 2, ... kept: bool. accept: probability that it was kept, given
    the draft, by the rule of a chain: min(1, p / q). position: sampled tokens before it in its trajectory.
    turn: 0, 1, ... kind: token class, "" where unknown. entropy: of the target at its place, nat.
    """

    trajectory: np.ndarray
    depth: np.ndarray
    kept: np.ndarray
    accept: np.ndarray
    position: np.ndarray
    turn: np.ndarray
    kind: np.ndarray
    entropy: np.ndarray


@dataclass(slots=True, kw_only=True)
class Cut:
    """One row of a cut. label: of the bin. rate: kept / judged; se: None for a single trajectory."""

    label: str
    rate: float
    se: float | None
    judged: int
    entropy: float


def verified_in(records: Iterable[Mapping[str, Any]], *, plain_commands: bool = False) -> VerifiedDrafts:
    """All judged drafts of records that have them; what lies behind the end of a turn is left out."""
    rows: list[tuple[Any, ...]] = []
    for number, record in enumerate(records):
        if record.get("drafts") is None:
            continue
        where: dict[int, tuple[int, int]] = {}  # token -> (turn, sampled tokens before)
        for turn, (start, end) in enumerate(sampled_spans(record)):
            where |= {place: (turn, len(where) + place - start) for place in range(start, end)}
        kinds = token_classes(record, plain_commands=plain_commands)
        for position, num_accepted, tokens, p, q in record["drafts"]:
            for i in range(min(num_accepted + 1, len(tokens))):
                place = position + i
                if place not in where or where[place][0] != where[position][0]:
                    break
                turn, before = where[place]
                accept = min(1.0, p[i] / q[i]) if q[i] > 0 else 1.0
                entropy = record["entropies"][place]
                kind = kinds[place] or ""
                rows.append((number, i + 1, i < num_accepted, accept, before, turn, str(kind), entropy))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 8
    names = ("trajectory", "depth", "kept", "accept", "position", "turn", "kind", "entropy")
    return VerifiedDrafts(**{name: np.array(column) for name, column in zip(names, columns, strict=True)})


def verified_drafts(run: RunData, records: Iterable[Mapping[str, Any]]) -> VerifiedDrafts:
    """The judged drafts of recorded rollouts of a run, whose environment says what a command is."""
    env = run.settings.get("env") or {}
    plain = env.get("name") == "swe" and env.get("action_mode", "plain") == "plain"
    return verified_in(records, plain_commands=plain)


def acceptance_by(drafts: VerifiedDrafts, key: str) -> list[Cut]:
    """Rates by "depth", "position" (buckets of 32 tokens), "turn", "kind" or "entropy" (bins in nat)."""
    if not len(drafts.kept):
        return []
    values: np.ndarray = getattr(drafts, key)
    if key == "position":
        values = values // POSITION_BUCKET
        name = _bucket
    elif key == "entropy":
        values = np.digitize(values, ENTROPY_EDGES[1:])
        name = _entropy_bin
    else:
        name = str
    return [_cut(drafts, values == value, name(value)) for value in np.unique(values)]


def _bucket(number: int) -> str:
    return f"{number * POSITION_BUCKET}-{(number + 1) * POSITION_BUCKET - 1}"


def _entropy_bin(number: int) -> str:
    low = f"{ENTROPY_EDGES[number]:g}"
    return f"{low}-{ENTROPY_EDGES[number + 1]:g}" if number + 1 < len(ENTROPY_EDGES) else f">{low}"


def _cut(drafts: VerifiedDrafts, chosen: np.ndarray, label: str) -> Cut:
    kept, count = drafts.kept[chosen].astype(float), int(chosen.sum())
    rate = float(kept.mean())
    error = clustered_error(kept - rate, drafts.trajectory[chosen])
    se = None if isnan(error) else error / count
    return Cut(label=label, rate=rate, se=se, judged=count, entropy=float(drafts.entropy[chosen].mean()))


def lengths(records: Iterable[Mapping[str, Any]]) -> dict[str, Estimate | int]:
    """Acceptance length as counted and as p and q of the same drafts predict, and their difference.

    Predicted: 1 + sum_j prod_{i<=j} min(1, p_i / q_i) per verify step, exact in expectation for a chain that
    is judged token by token (Leviathan et al. Alg. 1); block verification accepts at least as much. Errors
    are clustered by trajectory; {} without recorded drafts.
    """
    counted, expected, steps = [], [], []
    for record in records:
        drafts = record.get("drafts") or []
        if drafts:
            counted.append(sum(n for _, n, *_ in drafts))
            expected.append(sum(float(_reach(p, q).sum()) for *_, p, q in drafts))
            steps.append(len(drafts))
    if len(steps) < 2:
        return {}
    weights = np.array(steps, dtype=float)
    observed = _ratio(np.array(counted, dtype=float), weights, offset=1.0)
    predicted = _ratio(np.array(expected), weights, offset=1.0)
    gap = _ratio(np.array(counted) - np.array(expected), weights)
    return {
        "observed": observed,
        "predicted": predicted,
        "difference": gap,
        "verify_steps": int(weights.sum()),
    }


def _reach(p: Sequence[float], q: Sequence[float]) -> np.ndarray:
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    return np.cumprod(np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0)))


def _ratio(totals: np.ndarray, weights: np.ndarray, offset: float = 0.0) -> Estimate:
    """sum totals / sum weights + offset, with the error of a ratio over clusters."""
    value = float(totals.sum() / weights.sum())
    terms = (totals - value * weights) / weights.sum()
    se = cr1_error(float(terms @ terms), len(terms))
    return Estimate(value=value + offset, se=se, df=len(terms) - 1)


def boundary(tables: Sequence[ProbeTable]) -> list[dict[str, float]]:
    """Rejection against target-only by depth: rejection is better where TV(p, q) < 1 - p(argmax q) (Eq. 48).

    Per depth: `tv` and `outside` (mass of the target outside the draft's first choice), means over contexts,
    `margin` = outside - tv = alpha_RS - alpha_TO, and the `share` of contexts where rejection is better.
    """
    rows = []
    filled = [table for table in tables if len(table.positions)]
    if not filled:
        return rows
    rejection, target_only = (
        np.concatenate([t.values[name] for t in filled]) for name in ("rejection", "target_only")
    )
    for depth in range(rejection.shape[1]):
        seen = ~np.isnan(rejection[:, depth])
        a, b = rejection[seen, depth], target_only[seen, depth]
        if len(a):
            rows.append(
                {
                    "depth": depth + 1,
                    "tv": float(1 - a.mean()),
                    "outside": float(1 - b.mean()),
                    "margin": float((a - b).mean()),
                    "share": float((a > b).mean()),
                    "contexts": len(a),
                }
            )
    return rows


def distributions(run: RunData, depth: int = SHOWN_DEPTH) -> dict[str, list[float]]:
    """Series by probe on the fixed contexts: entropy gap, KL both ways, masses above (Fig. 10, 11)."""
    found: dict[str, list[float]] = {}
    for name in COLUMNS:
        if name not in ("accept", "top"):
            steps, values = run.series(f"probe/fixed/{name}/depth_{depth}")
            found["step"], found[name] = [float(step) for step in steps], values
    pairs = zip(found["draft_entropy"], found["target_entropy"], strict=True)
    found["entropy_gap"] = [q - p for q, p in pairs]
    return found


def speedups(run: RunData, draft_cost: float, baseline: RunData | None = None) -> dict[str, float]:
    """Predicted speed-up, length / (1 + draft_cost gamma), and the observed one where it is known.

    observed: median rollout tokens/s over that of `baseline` (a run with spec.mode=none), else what adaptive
    gamma measured. Cost as in Leviathan et al. Thm 3.8.
    """
    gamma = (run.settings.get("spec") or {}).get("gamma", SpecConfig().gamma)
    _, observed_lengths = run.series(LENGTH)
    found: dict[str, float] = {}
    if observed_lengths:
        found["predicted"] = median(observed_lengths) / (1 + draft_cost * gamma)
    if baseline is not None:
        mine, theirs = (r.series("perf/tokens_per_s/rollout")[1] for r in (run, baseline))
        if mine and theirs:
            found["observed"] = median(mine) / median(theirs)
    elif measured := run.series("spec/speedup_observed")[1]:
        found["observed"] = median(measured)
    return found


def entropy_slope(run: RunData, figure: str = LENGTH) -> Estimate | None:
    """Slope of an acceptance figure on entropy over all steps of the run, per nat (Bebop Fig. 8).

    Descriptive: mismatch that grows with the steps is in it. None below 6 steps, or without variation.
    """
    _, y, h = paired(run, figure, ENTROPY)
    if len(y) < 6 or not np.ptp(h):
        return None
    return robust_slope(h, y, trend=False, level=0.95)
