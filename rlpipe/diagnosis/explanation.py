"""Why acceptance moved, as one statement, from the probe set or from the split by steps.

Owns the choice between the two analyses. With a probe set, fixed contexts decide between entropy and the
draft, since their text is the same at both ends; a part is a certain cause only where it is clear of 0
whichever slope is right. Without one, the split by steps can show that entropy moved along, never that it is
the reason. A slope that was measured by intervention (`metrics.probe.slope`) replaces those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlpipe.diagnosis.advice import Setup
from rlpipe.diagnosis.attribution import Evaluations
from rlpipe.diagnosis.decomposition import Decomposition
from rlpipe.diagnosis.fixed_contexts import decompose_fixed, probe_series, rule_of
from rlpipe.diagnosis.problems import Finding
from rlpipe.diagnosis.regression import contrast, thirds
from rlpipe.diagnosis.two_slopes import LEVEL, Splits, split_run
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval

MIN_CHANGE = 0.015  # of the acceptance rate, to be reported
MIN_PROBES = 6
MIN_STANDING = 0.02  # staleness from first to last, to be reported

PART_NAMES = {
    "entropy": "entropy of the target",
    "mismatch": "fit of the draft",
    "contexts": "other contexts",
    "staleness": "staleness of the engines",
}
CLAIMS = {
    "entropy": "the target's entropy moved and acceptance with it, while the draft fits as before",
    "draft_stale": "the target moved and the draft, which is not trained, fits it differently",
    "draft_training": "on the same text target and draft fit differently than at first, though the draft is "
    "trained online",
    "contexts": "the policy visits other contexts, which are easier or harder to draft for than entropy says",
    "staleness": "the engines' weights lag further behind than at first",
}
ENTROPY_HINT = (
    "nothing is broken; spec.mode=rejection with a draft trained by draft.objective=e2e_tv loses least when "
    "entropy rises"
)
PROBE_HINT = "set metrics.probe.every=5"


@dataclass(slots=True, frozen=True, kw_only=True)
class Parts:
    """The change of acceptance at depth 1 between the first and the last third of the probes.

    causes: its parts, by the keys of `PART_NAMES`.
    standing: mean staleness over all probes, which no change shows.
    """

    change: Interval
    causes: Mapping[str, Interval]
    standing: Interval


def explain_acceptance(run: RunData) -> Finding | None:
    """Explain the change of a run's acceptance; None for a run without drafts, or a very short one."""
    splits = split_run(run, LEVEL)
    measured = measured_slope(run)
    parts = _parts(run, splits, measured)
    if parts is not None:
        return _explain_by_probes(run, parts, splits)
    return _explain_by_steps(splits, measured) if splits else None


def measured_slope(run: RunData) -> Interval | None:
    """Return the slope per nat that was measured by intervention; None where none was."""
    slope = ((run.settings.get("metrics") or {}).get("probe") or {}).get("slope")
    return Interval(*slope) if slope else None


# --- with a probe set ------------------------------------------------------------------------------


def _parts(run: RunData, splits: Splits | None, measured: Interval | None) -> Parts | None:
    """Compute the parts from the probe set; None below `MIN_PROBES` probes.

    With the slope that was measured by intervention; without one, each part is as wide as the two slopes of
    the run make it.
    """
    series = probe_series(run)
    changes = decompose_fixed(run, LEVEL).get((rule_of(run), 1))
    if series is None or not changes or len(series[0].observed) < MIN_PROBES:
        return None
    evaluations, last = series[0], changes[-1]

    slopes = [measured or last.slope.interval]
    if not measured and splits and np.isfinite(splits.by_slope["between steps"].slope.low):
        slopes.append(splits.by_slope["between steps"].slope)
    # Without a measured slope, an interval must cover the part for every slope of the run.
    by_slope = [_parts_along(evaluations, last, slope) for slope in slopes]
    causes = {
        name: Interval(part.value, min(p[name].low for p in by_slope), max(p[name].high for p in by_slope))
        for name, part in by_slope[0].items()
    }

    # Engine and trainer read the same drafts, so their difference is due to the weights.
    n = len(evaluations.observed)
    assert evaluations.current is not None  # `probe_series` has all five series
    staleness = evaluations.observed - evaluations.current
    causes["staleness"] = contrast(staleness, thirds(n), level=LEVEL)
    return Parts(
        change=contrast(evaluations.observed, thirds(n), level=LEVEL),
        causes=causes,
        standing=contrast(staleness, np.full(n, 1 / n), level=LEVEL),
    )


def _parts_along(e: Evaluations, last: Decomposition, slope: Interval) -> dict[str, Interval]:
    """Compute entropy, mismatch and contexts with this slope. last: the change at the last probe."""
    assert e.current is not None and e.fixed is not None and e.fixed_entropy is not None
    weights = thirds(len(e.observed))
    entropy_change = float(weights @ e.entropy)
    fixed_entropy_change = float(weights @ e.fixed_entropy)
    other_entropy_change = float(weights @ (e.entropy - e.fixed_entropy))

    # The error on fixed contexts is of the choice of contexts, which is the same in every probe.
    error = last.total.half_width
    fixed_change = float(weights @ e.fixed)
    fixed = Interval(fixed_change, fixed_change - error, fixed_change + error)
    contexts = contrast(e.current - e.fixed, weights, level=LEVEL)
    return {
        "entropy": slope.times(entropy_change),
        "mismatch": fixed - slope.times(fixed_entropy_change),
        "contexts": contexts - slope.times(other_entropy_change),
    }


def _explain_by_probes(run: RunData, parts: Parts, splits: Splits | None) -> Finding:
    setup, causes = Setup.from_settings(run.settings), parts.causes
    head = f"Acceptance at depth 1 {_moved(parts.change)} between the first and the last third of the probes"
    notes = (_which_slope(measured_slope(run)), _disagreement(causes["mismatch"], splits))
    remark = " ".join(filter(None, notes))

    clear = [name for name, part in causes.items() if _is_clear(part)]
    if not clear:
        return _no_cause(parts, setup, head, remark=remark)

    first = max(clear, key=lambda name: abs(causes[name].value))
    part = causes[first]
    name = {"mismatch": "draft_training" if setup.online else "draft_stale"}.get(first, first)
    lead = ":" if _is_clear(parts.change) else "; yet its parts did, and cancel:"
    listed = "; ".join(f"{PART_NAMES[n]} {points(p)}" for n, p in causes.items())

    # Another part of nearly the same size makes the first one uncertain.
    rivals = [n for n in causes if n != first and abs(causes[n].value) > 0.7 * abs(part.value)]
    return Finding(
        name=name,
        text=f"{head}{lead} {CLAIMS[name]}. In parts: {listed}. {remark}".strip(),
        hint=_hint(name, setup, _points_back(run, part, setup.gamma)) if part.value < 0 else "",
        sure=not rivals,
    )


def _no_cause(parts: Parts, setup: Setup, head: str, *, remark: str) -> Finding:
    """Return the finding without a clear part: a constant staleness, no change, or an unsettled one."""
    standing = parts.standing
    if standing.clear and standing.value <= -MIN_STANDING:
        text = (
            f"{head}, but throughout engines kept {points(standing)} beside what the newest weights "
            "would have: a constant staleness, which no change shows."
        )
        return Finding(name="standing_staleness", text=text, hint=_staleness_hint(setup))

    if _is_clear(parts.change):
        text = f"{head}. No single part is clear of 0, so none is named. {remark}"
        return Finding(name="unsettled", text=text.strip(), sure=False)
    return Finding(name="nothing", text=f"{head}. No part is clear of 0. {remark}".strip(), sure=False)


def _disagreement(mismatch: Interval, splits: Splits | None) -> str:
    """Write a sentence where the split by steps and the mismatch on fixed contexts differ."""
    if splits is None:
        return ""
    rests = {name: split.rest for name, split in splits.by_slope.items()}
    opposed = any(
        _is_clear(a) and _is_clear(b) and a.value * b.value < 0 for a, b in pairwise(rests.values())
    )
    differ = any(
        _is_clear(rest) and not (_is_clear(mismatch) and rest.value * mismatch.value > 0)
        for rest in rests.values()
    )
    if not differ and not opposed:
        return ""

    listed = " and ".join(f"{points(rest)} {name}" for name, rest in rests.items())
    return (
        f"The split by steps differs: besides entropy it leaves {listed}, where fixed contexts give the "
        f"draft {points(mismatch)}. Believe the fixed contexts: their text is the same at both ends, while "
        "steps mix prompts, staleness and training."
    )


# --- by steps only ---------------------------------------------------------------------------------


def _explain_by_steps(splits: Splits, measured: Interval | None) -> Finding:
    """Explain by steps only: entropy moved along, or it did not; never a reason."""
    change = splits.change
    head = (
        f"Acceptance {_moved(change)} from steps {splits.early[0]}-{splits.early[1]} to "
        f"{splits.late[0]}-{splits.late[1]}"
    )
    if not _is_clear(change):
        return Finding(name="nothing", text=f"{head}: no change beyond chance.", sure=False)

    by_slope = "; ".join(
        f"slope {_per_nat(split.slope)} {name} leaves {points(split.rest)}"
        for name, split in splits.by_slope.items()
    )
    head += f", while entropy moved by {splits.entropy_change:+.3f} nat: {by_slope}. "

    # A slope from an experiment is better than those of the run, which are confounded.
    rest, alongs = splits.hull, [split.along for split in splits.by_slope.values()]
    if measured:
        alongs = [measured.times(splits.entropy_change)]
        rest = change - alongs[0]
        head += f"{_which_slope(measured)} It leaves {points(rest)}: believe this one. "

    if rest.clear:
        text = head + "More changed than entropy goes along with. Steps cannot say what: probes can."
        return Finding(name="unexplained", text=text, hint=PROBE_HINT, sure=False)
    if all(along.clear and abs(along.value) > abs(change.value) / 2 for along in alongs):
        text = head + "Entropy may account for all of it; without probes that is not settled."
        return Finding(name="entropy", text=text, hint=ENTROPY_HINT, sure=False)
    return Finding(name="unsettled", text=head + "This run cannot settle it.", hint=PROBE_HINT, sure=False)


# --- hints and phrases -----------------------------------------------------------------------------


def _hint(name: str, setup: Setup, worth: str) -> str:
    """Return the setting to change for a cause. worth: of a better draft, see `_points_back`."""
    hints = {
        "staleness": _staleness_hint(setup),
        "entropy": ENTROPY_HINT,
        "draft_stale": f"set draft.train=online, or adapt the draft again (recipe mtp_adapt){worth}",
        "draft_training": "raise draft.lr, or adapt the draft anew with another draft.objective: its "
        f"training does not keep up{worth}",
        "contexts": f"adapt the draft on what the policy now visits (recipe mtp_adapt){worth}",
    }
    return hints[name]


def _staleness_hint(setup: Setup) -> str:
    return f"lower pipeline.max_staleness={setup.max_staleness}, and look for canary_failed in events.jsonl"


def _points_back(run: RunData, lost: Interval, gamma: int) -> str:
    """Describe the gain of a draft that restores the lost points; "" where it cannot be computed."""
    gain = length_gain(run, -lost.value, gamma)
    if not gain:
        return ""
    gained = points(Interval(-lost.value, -lost.high, -lost.low))
    return f", worth about {gain:.0%} tokens per verify step if it gives back {gained}"


def length_gain(run: RunData, points_back: float, gamma: int) -> float:
    """Return the relative gain of tokens per verify step when every depth accepts that much more."""
    rate = run.series("spec/acceptance_rate/depth_1")[1][-10:] or run.series("spec/acceptance_rate")[1][-10:]
    if not rate:
        return 0.0

    now = float(np.mean(rate))
    then = min(1.0, now + points_back)
    return sum(then**k for k in range(gamma + 1)) / sum(now**k for k in range(gamma + 1)) - 1


def _which_slope(measured: Interval | None) -> str:
    if measured is None:
        return ""
    return (
        f"Entropy counts by the slope measured by intervention, {_per_nat(measured)}, not by those "
        "of the run, which also hold what changed with entropy."
    )


def points(part: Interval) -> str:
    """Format an interval in points of the rate.

    >>> points(Interval(-0.031, -0.04, -0.022))
    '-3.1 [-4.0, -2.2] points'
    """
    return f"{100 * part.value:+.1f} [{100 * part.low:+.1f}, {100 * part.high:+.1f}] points"


def _per_nat(slope: Interval) -> str:
    return f"{slope.value:+.3f} [{slope.low:+.3f}, {slope.high:+.3f}] per nat"


def _is_clear(part: Interval) -> bool:
    """Return whether a part is clear of 0 and large enough to be reported."""
    return part.clear and abs(part.value) >= MIN_CHANGE


def _moved(change: Interval) -> str:
    if not _is_clear(change):
        return f"did not move beyond chance ({points(change)})"
    size, ends = 100 * abs(change.value), sorted((100 * abs(change.low), 100 * abs(change.high)))
    return f"{'rose' if change.value > 0 else 'fell'} by {size:.1f} [{ends[0]:.1f}, {ends[1]:.1f}] points"
