"""Why acceptance moved, as one statement: what the splits and the probe set agree on, and whom to believe.

Owns the choice between analyses. With a probe set, fixed contexts decide between entropy and the draft, since
their text is the same at both ends; parts are named for certain only where they are clear of 0 whichever
slope is right. Without one, the split by steps can say that entropy goes along, never that it is the reason.
A slope that was measured by intervention (`metrics.probe.slope`) takes the place of those read off the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlpipe.diagnosis.advice import Setup
from rlpipe.diagnosis.attribution import Evaluations
from rlpipe.diagnosis.fixed_contexts import decompose_fixed, probe_series, rule_of
from rlpipe.diagnosis.regression import contrast
from rlpipe.diagnosis.two_slopes import LEVEL, Splits, split_run
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval

LEAST = 0.015  # change of the acceptance rate that is worth a word
PROBES = 6
STANDING = 0.02  # staleness that is there from first to last


@dataclass(slots=True, frozen=True, kw_only=True)
class Finding:
    """One thing the verdict says. name: of the cause. remedy: what to set. sure: the data leave no other."""

    name: str
    text: str
    remedy: str = ""
    sure: bool = True


def explain_acceptance(run: RunData) -> Finding | None:
    """The one statement; None for a run without drafts, or too short for any."""
    splits = split_run(run, LEVEL)
    parts = _parts(run, splits)
    if parts is None:
        return _by_steps(splits, measured_slope(run)) if splits else None
    return _by_probe(run, parts, splits)


def measured_slope(run: RunData) -> Interval | None:
    """The slope per nat that was measured by intervention; None where none was."""
    slope = ((run.settings.get("metrics") or {}).get("probe") or {}).get("slope")
    return Interval(*slope) if slope else None


def _parts(run: RunData, splits: Splits | None) -> dict[str, Interval] | None:
    """Parts at depth 1 from the probe set; None without enough of it.

    With the slope that was measured by intervention, or as wide as the two slopes of the run make them.
    """
    series = probe_series(run)
    changes = decompose_fixed(run, LEVEL).get((rule_of(run), 1))
    if series is None or not changes or len(series[0].observed) < PROBES:
        return None
    evaluations, within = series[0], changes[-1].slope
    measured = measured_slope(run)
    slopes = [measured or within.interval]
    if not measured and splits and np.isfinite(splits.by_slope["between steps"].slope.low):
        slopes.append(splits.by_slope["between steps"].slope)
    found = [_of_slope(evaluations, changes[-1], slope) for slope in slopes]
    hull = {
        name: Interval(
            found[0][name].value, min(f[name].low for f in found), max(f[name].high for f in found)
        )
        for name in found[0]
    }
    return hull | _without_slope(evaluations)


def thirds(n: int) -> np.ndarray:
    """Weights of the mean of the last third minus that of the first."""
    weights, third = np.zeros(n), max(2, n // 3)
    weights[:third], weights[n - third :] = -1 / third, 1 / third
    return weights


def _of_slope(e: Evaluations, fixed: object, slope: Interval) -> dict[str, Interval]:
    """entropy, mismatch and contexts with this slope."""
    weights = thirds(len(e.observed))
    moved = float(weights @ e.entropy)
    stays = float(weights @ e.fixed_entropy)
    beyond = float(weights @ (e.entropy - e.fixed_entropy))
    error = fixed.total.half_width  # of contexts, the same in every probe
    draft = float(weights @ e.fixed)
    contexts = contrast(e.current - e.fixed, weights, level=LEVEL)

    return {
        "entropy": slope.times(moved),
        "mismatch": Interval(draft, draft - error, draft + error) - slope.times(stays),
        "contexts": contexts - slope.times(beyond),
    }


def _without_slope(e: Evaluations) -> dict[str, Interval]:
    n = len(e.observed)
    weights, stale = thirds(n), e.observed - e.current
    return {
        "staleness": contrast(stale, weights, level=LEVEL),
        "change": contrast(e.observed, weights, level=LEVEL),
        "standing": contrast(stale, np.full(n, 1 / n), level=LEVEL),
    }


def _by_probe(run: RunData, parts: Mapping[str, Interval], splits: Splits | None) -> Finding:
    setup = Setup.of(run.settings)
    change, standing = parts["change"], parts["standing"]
    causes = {n: p for n, p in parts.items() if n not in ("change", "standing")}
    worth = [n for n, p in causes.items() if _told(p)]
    worth.sort(key=lambda n: -abs(causes[n].value))
    head = f"Acceptance at depth 1 {_moved(change)} between the first and the last third of the probes"
    listed = "; ".join(f"{WORDS[n]} {points(p)}" for n, p in causes.items())
    remark = " ".join(filter(None, (_which_slope(measured_slope(run)), _disagreement(parts, splits))))
    if not worth:
        if standing.clear and standing.value <= -STANDING:
            text = (
                f"{head}, but throughout engines kept {points(standing)} beside what the newest weights "
                "would have: a constant staleness, which no change shows."
            )
            return Finding(name="standing_staleness", text=text, remedy=_fresher(setup))
        quiet = not _told(change)
        verdict = "No part is clear of 0." if quiet else "No single part is clear of 0, so none is named."
        return Finding(
            name="nothing" if quiet else "unsettled", text=f"{head}. {verdict} {remark}".strip(), sure=False
        )
    first = worth[0]
    name = {"mismatch": "draft_training" if setup.online else "draft_stale"}.get(first, first)
    lead = ":" if _told(change) else "; yet its parts did, and cancel:"
    text = f"{head}{lead} {CLAIMS[name]}. In parts: {listed}. {remark}".strip()
    lost = causes[first].value < 0
    rivals = [n for n in causes if n != first and abs(causes[n].value) > 0.7 * abs(causes[first].value)]
    return Finding(
        name=name, text=text, remedy=_remedy(name, setup, causes[first], run) if lost else "", sure=not rivals
    )


def _which_slope(measured: Interval | None) -> str:
    if measured is None:
        return ""
    return (
        f"Entropy counts by the slope measured by intervention, {_per_nat(measured)}, not by those "
        "of the run, which also hold what changed with entropy."
    )


def _by_steps(splits: Splits, measured: Interval | None) -> Finding:
    """What steps alone allow: entropy goes along, or it does not; never a reason."""
    change = splits.change
    head = (
        f"Acceptance {_moved(change)} from steps {splits.early[0]}-{splits.early[1]} to "
        f"{splits.late[0]}-{splits.late[1]}"
    )
    lines = "; ".join(
        f"slope {_per_nat(s.slope)} {name} leaves {points(s.rest)}" for name, s in splits.by_slope.items()
    )
    if not _told(change):
        return Finding(name="nothing", text=f"{head}: no change beyond chance.", sure=False)
    head += f", while entropy moved by {splits.entropy_change:+.3f} nat: {lines}. "
    rest, alongs = splits.hull, [s.along for s in splits.by_slope.values()]
    if measured:
        alongs = [measured.times(splits.entropy_change)]
        rest = change - alongs[0]
        head += f"{_which_slope(measured)} It leaves {points(rest)}: believe this one. "
    if rest.clear:
        text = head + "More changed than entropy goes along with. Steps cannot say what: probes can."
        return Finding(name="unexplained", text=text, remedy="set metrics.probe.every=5", sure=False)
    same = all(a.clear and abs(a.value) > abs(change.value) / 2 for a in alongs)
    if same:
        words = "Entropy may account for all of it; without probes that is not settled."
        return Finding(name="entropy", text=head + words, remedy=ENTROPY_REMEDY, sure=False)
    return Finding(
        name="unsettled",
        text=head + "This run cannot settle it.",
        remedy="set metrics.probe.every=5",
        sure=False,
    )


def _disagreement(parts: Mapping[str, Interval], splits: Splits | None) -> str:
    """A sentence where the split by steps and the fixed contexts say different things."""
    if splits is None:
        return ""
    rests = {name: s.rest for name, s in splits.by_slope.items()}
    opposed = any(_told(a) and _told(b) and a.value * b.value < 0 for a, b in pairwise(rests.values()))
    mine = parts["mismatch"]
    differ = [r for r in rests.values() if _told(r) and not (_told(mine) and r.value * mine.value > 0)]
    if not differ and not opposed:
        return ""
    told = " and ".join(f"{points(r)} {name}" for name, r in rests.items())
    return (
        f"The split by steps differs: besides entropy it leaves {told}, where fixed contexts give the draft "
        f"{points(mine)}. Believe the fixed contexts: their text is the same at both ends, while steps mix "
        "prompts, staleness and training."
    )


WORDS = {
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
ENTROPY_REMEDY = (
    "nothing is broken; spec.mode=rejection with a draft trained by mtp.objective=e2e_tv loses least when "
    "entropy rises"
)


def _remedy(name: str, setup: Setup, part: Interval, run: RunData) -> str:
    if name == "staleness":
        return _fresher(setup)
    if name == "entropy":
        return ENTROPY_REMEDY
    gain = length_gain(run, -part.value, setup.gamma)
    worth = (
        f", worth about {gain:.0%} tokens per verify step if it gives back "
        f"{points(Interval(-part.value, -part.high, -part.low))}"
        if gain
        else ""
    )
    if name == "draft_stale":
        return f"set mtp.train=online, or adapt the draft again (recipe mtp_adapt){worth}"
    if name == "draft_training":
        return (
            "raise mtp.lr, or adapt the draft anew with another mtp.objective: its training does not "
            f"keep up{worth}"
        )
    return f"adapt the draft on what the policy now visits (recipe mtp_adapt){worth}"


def length_gain(run: RunData, points_back: float, gamma: int) -> float:
    """Relative gain of tokens per verify step when every depth accepts that much more."""
    rate = run.series("spec/acceptance_rate/depth_1")[1][-10:] or run.series("spec/acceptance_rate")[1][-10:]
    if not rate:
        return 0.0
    now = float(np.mean(rate))
    then = min(1.0, now + points_back)
    return sum(then**k for k in range(gamma + 1)) / sum(now**k for k in range(gamma + 1)) - 1


def _fresher(setup: Setup) -> str:
    return f"lower pipeline.max_staleness={setup.max_staleness}, and look for canary_failed in events.jsonl"


def points(part: Interval) -> str:
    """In points of the rate: -3.1 [-4.0, -2.2] points."""
    return f"{100 * part.value:+.1f} [{100 * part.low:+.1f}, {100 * part.high:+.1f}] points"


def _per_nat(slope: Interval) -> str:
    return f"{slope.value:+.3f} [{slope.low:+.3f}, {slope.high:+.3f}] per nat"


def _told(part: Interval) -> bool:
    """Whether it is clear of 0 and large enough for a word."""
    return part.clear and abs(part.value) >= LEAST


def _moved(change: Interval) -> str:
    if not _told(change):
        return f"did not move beyond chance ({points(change)})"
    size, ends = 100 * abs(change.value), sorted((100 * abs(change.low), 100 * abs(change.high)))
    return f"{'rose' if change.value > 0 else 'fell'} by {size:.1f} [{ends[0]:.1f}, {ends[1]:.1f}] points"
