"""Breaks down the acceptance of a recorded run by depth, position, turn, kind of token and entropy.

Owns the breakdowns; docs/run_directory.md describes the records and their format. Flow:

    rollouts/step_N.jsonl -> `verified_in` (an entry per verified draft token) -> `acceptance_by`
                          -> `lengths` (predicted and observed), `lookups` (another drafter)
    probe/step_N.jsonl    -> `boundary` (rejection against target-only, Bebop Fig. 13)
    metrics.jsonl         -> `distributions` (Fig. 10, 11), `speedups`, `entropy_slope` (Fig. 8)

Rates are sums over sums; their errors are clustered by trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from rlpipe.spec.suffix import continue_suffix

BUCKET_TOKENS = 32  # sampled tokens of a bin of positions
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0)  # edges of bins, in nat; the last bin has no upper edge
SHOWN_DEPTH = 1


@dataclass(slots=True, kw_only=True)
class VerifiedDrafts:
    """Draft tokens that were verified, [n] each: depths 1..num_accepted + 1 of every verify step.

    trajectory: index of the trajectory's record.
    depth: 1, 2, ...
    kept: whether the token was accepted.
    accept: probability of accepting the token under the chain rule: min(1, p / q).
    position: number of sampled tokens before the token in its trajectory.
    turn: 0, 1, ...
    kind: token class, "" if unknown.
    entropy: entropy of the target at the token, in nat.
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
    """One bin of a breakdown.

    label: name of the bin.
    rate: accepted / verified.
    se: standard error of the rate; None for a single trajectory.
    verified: number of verified draft tokens.
    entropy: mean over these tokens, nat.
    """

    label: str
    rate: float
    se: float | None
    verified: int
    entropy: float


def verified_in(records: Iterable[Mapping[str, Any]], *, plain_commands: bool = False) -> VerifiedDrafts:
    """Collect the verified draft tokens of records; tokens beyond the end of a turn are left out.

    Args:
        records: recorded rollouts; records without drafts are skipped.
        plain_commands: whether a full turn is a command, see `token_classes`.
    """
    rows: list[tuple[Any, ...]] = []
    for number, record in enumerate(records):
        if record.get("drafts") is None:
            continue

        # token index -> (turn, sampled tokens before it)
        sampled: dict[int, tuple[int, int]] = {}
        for turn, (start, end) in enumerate(sampled_spans(record)):
            sampled |= {index: (turn, len(sampled) + index - start) for index in range(start, end)}
        kinds = token_classes(record, plain_commands=plain_commands)

        for position, num_accepted, tokens, p, q in record["drafts"]:
            # Tokens after the first rejected one were not verified.
            for i in range(min(num_accepted + 1, len(tokens))):
                index = position + i
                if index not in sampled or sampled[index][0] != sampled[position][0]:
                    break  # beyond the end of the turn
                turn, before = sampled[index]
                accept = min(1.0, p[i] / q[i]) if q[i] > 0 else 1.0
                entropy = record["entropies"][index]
                kind = str(kinds[index] or "")
                rows.append((number, i + 1, i < num_accepted, accept, before, turn, kind, entropy))

    columns = list(zip(*rows, strict=True)) if rows else [()] * 8
    names = ("trajectory", "depth", "kept", "accept", "position", "turn", "kind", "entropy")
    return VerifiedDrafts(**{name: np.array(column) for name, column in zip(names, columns, strict=True)})


def verified_drafts(run: RunData, records: Iterable[Mapping[str, Any]]) -> VerifiedDrafts:
    """Collect the verified draft tokens of a run's rollouts, with commands defined by its environment."""
    env = run.settings.get("env") or {}
    plain = env.get("name") == "swe" and env.get("action_mode", "plain") == "plain"
    return verified_in(records, plain_commands=plain)


def acceptance_by(drafts: VerifiedDrafts, key: str) -> list[Cut]:
    """Break acceptance down by a column of `drafts`, in ascending order of its bins.

    Args:
        drafts: verified draft tokens.
        key: "depth", "position" (bins of 32 tokens), "turn", "kind" or "entropy" (bins in nat).
    """
    if not len(drafts.kept):
        return []

    values: np.ndarray = getattr(drafts, key)
    label: Callable[[Any], str] = str
    if key == "position":
        values, label = values // BUCKET_TOKENS, _position_label
    elif key == "entropy":
        values, label = np.digitize(values, ENTROPY_EDGES[1:]), _entropy_label
    return [_cut(drafts, values == value, label(value)) for value in np.unique(values)]


def _position_label(number: int) -> str:
    return f"{number * BUCKET_TOKENS}-{(number + 1) * BUCKET_TOKENS - 1}"


def _entropy_label(number: int) -> str:
    low = f"{ENTROPY_EDGES[number]:g}"
    return f"{low}-{ENTROPY_EDGES[number + 1]:g}" if number + 1 < len(ENTROPY_EDGES) else f">{low}"


def _cut(drafts: VerifiedDrafts, chosen: np.ndarray, label: str) -> Cut:
    kept, count = drafts.kept[chosen].astype(float), int(chosen.sum())
    rate = float(kept.mean())

    # Tokens of one trajectory are correlated.
    error = clustered_error(kept - rate, drafts.trajectory[chosen])
    se = None if isnan(error) else error / count
    return Cut(label=label, rate=rate, se=se, verified=count, entropy=float(drafts.entropy[chosen].mean()))


def lengths(records: Iterable[Mapping[str, Any]]) -> dict[str, Estimate | int]:
    """Compare the observed acceptance length with the length that p and q of the same drafts predict.

        predicted = 1 + sum_j prod_{i<=j} min(1, p_i / q_i)   per verify step

    The prediction is exact in expectation for a chain that is verified token by token. Block verification
    accepts at least as much.

    Returns:
        observed, predicted, difference (with errors clustered by trajectory) and the number of verify_steps;
        {} for fewer than two trajectories with drafts.
    Source: Leviathan et al., Alg. 1.
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


def _reach(target: Sequence[float], draft: Sequence[float]) -> np.ndarray:
    """Return for each depth the probability of accepting all tokens up to this depth, [gamma]."""
    p, q = np.asarray(target, dtype=float), np.asarray(draft, dtype=float)
    return np.cumprod(np.minimum(1.0, np.divide(p, q, out=np.ones_like(p), where=q > 0)))


def _ratio(totals: np.ndarray, weights: np.ndarray, offset: float = 0.0) -> Estimate:
    """Compute sum(totals) / sum(weights) + offset, with the error of a ratio over clusters."""
    value = float(totals.sum() / weights.sum())
    terms = (totals - value * weights) / weights.sum()
    se = cr1_error(float(terms @ terms), len(terms))
    return Estimate(value=value + offset, se=se, df=len(terms) - 1)


def lookups(
    records: Iterable[Mapping[str, Any]], gamma: int, *, longest: int, cost: float = 1.0
) -> dict[str, Estimate] | None:
    """Compare a run's drafts with lookups of `gamma` tokens at the starts of the same verify steps.

    A token from a lookup has q = 1. So every lossless rule accepts it exactly if the target samples the same
    token, and the tokens sampled later show how many lookup tokens would have been accepted.

    Args:
        records: recorded rollouts; records without drafts are skipped.
        gamma: number of tokens looked up.
        longest: maximum length of the suffix that is looked up, in tokens.
        cost: cost of a step with the run's drafts, in units of a step with lookups.
    Returns:
        Tokens per verify step for `lookup` and for `drafts`, and the `difference`, cost * lookup - drafts
        (with errors clustered by trajectory); None for fewer than two trajectories with drafts.
    """
    found, accepted, steps = [], [], []
    for record in records:
        if not (drafts := record.get("drafts")):
            continue
        tokens, counts = np.array(record["tokens"]), []
        ends = {index: end for start, end in sampled_spans(record) for index in range(start, end)}
        for position, *_ in drafts:
            wanted = tokens[position : min(position + gamma, ends.get(position, position))]
            guess = continue_suffix(tokens[:position], longest, gamma)[: len(wanted)]
            counts.append(int(np.cumprod(guess == wanted).sum()))
        found.append(sum(counts))
        accepted.append(sum(n for _, n, *_ in drafts))
        steps.append(len(drafts))
    if len(steps) < 2:
        return None

    weights, looked_up, kept = (np.array(x, dtype=float) for x in (steps, found, accepted))
    return {
        "lookup": _ratio(looked_up, weights, offset=1.0),
        "drafts": _ratio(kept, weights, offset=1.0),
        "difference": _ratio(cost * (weights + looked_up) - (weights + kept), weights),
    }


def boundary(tables: Sequence[ProbeTable]) -> list[dict[str, float]]:
    """Compare rejection with target-only by depth.

    Rejection is better in a context if TV(p, q) < 1 - p(argmax q).

    Returns:
        For each depth, means over contexts of `tv` and of `outside` (the target's mass outside the draft's
        first choice); `margin` = outside - tv = alpha_RS - alpha_TO; the `share` of contexts in which
        rejection is better; and the number of `contexts`.
    Source: Bebop Eq. 48.
    """
    rows: list[dict[str, float]] = []
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
    """Return series over probes of fixed contexts, by name (Bebop Fig. 10, 11).

    They include the entropy gap, KL in both directions, the target's mass where p > q (target_above), and the
    draft's mass where q > p (draft_above).
    """
    series: dict[str, list[float]] = {}
    for name in COLUMNS:
        if name not in ("accept", "top"):
            steps, values = run.series(f"probe/fixed/{name}/depth_{depth}")
            series["step"], series[name] = [float(step) for step in steps], values

    pairs = zip(series["draft_entropy"], series["target_entropy"], strict=True)
    series["entropy_gap"] = [q - p for q, p in pairs]
    return series


def speedups(run: RunData, draft_cost: float, baseline: RunData | None = None) -> dict[str, float]:
    """Compute the predicted speed-up, length / (1 + draft_cost gamma), and the observed speed-up.

    Args:
        run: a run with drafts.
        draft_cost: cost of one draft pass, in plain decode steps.
        baseline: a run with spec.mode=none.
    Returns:
        `predicted`, and `observed`: the run's median rollout tokens/s divided by the baseline's. Without a
        baseline, `observed` is what adaptive gamma measured. A key is missing if its metrics are missing.
    Source: Leviathan et al., Thm 3.8, for the cost.
    """
    gamma = (run.settings.get("spec") or {}).get("gamma", SpecConfig().gamma)
    result: dict[str, float] = {}
    if observed_lengths := run.series(LENGTH)[1]:
        result["predicted"] = median(observed_lengths) / (1 + draft_cost * gamma)

    if baseline is not None:
        speeds, baseline_speeds = (r.series("perf/tokens_per_s/rollout")[1] for r in (run, baseline))
        if speeds and baseline_speeds:
            result["observed"] = median(speeds) / median(baseline_speeds)
    elif measured := run.series("spec/speedup_observed")[1]:
        result["observed"] = median(measured)
    return result


def entropy_slope(run: RunData, figure: str = LENGTH) -> Estimate | None:
    """Estimate the slope of an acceptance metric on entropy over all steps of a run, per nat (Bebop Fig. 8).

    The slope is only descriptive, because it includes the effect of growing mismatch. None for fewer than 6
    steps, or if the entropy does not vary.
    """
    _, y, h = paired(run, figure, ENTROPY)
    if len(y) < 6 or not np.ptp(h):
        return None
    return robust_slope(h, y, trend=False, level=0.95)
