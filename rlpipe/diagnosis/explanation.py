"""Explains why acceptance changed, in one statement about the split that a run emitted (`acceptance_split`).

Owns the wording and the thresholds. Every number is from `acceptance_split/*` at the last step, as in the
plots. With probes in the early and in the late steps, the statement is about depth 1: fixed contexts separate
the effects of entropy and draft. A part is a certain cause only if its interval excludes 0 for every slope,
and if there are `MIN_PROBES` probes. Without probes in both spans, the split can show that entropy changed at
the same time, but not that it is the cause. A temporary change, which the difference between early and late
steps does not show, is described in a separate sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import numpy as np

from rlpipe.config.probe import ProbeConfig
from rlpipe.diagnosis.acceptance_split import OVERALL, AcceptanceSplit, Split, of_run
from rlpipe.diagnosis.advice import LOOKUP_HINT, Setup, staleness_hint
from rlpipe.diagnosis.probe import step_of_probe
from rlpipe.diagnosis.problems import Finding
from rlpipe.diagnosis.regression import autocorrelation, detrended
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval, t_quantile

MIN_CHANGE = 0.015  # smallest change of the acceptance rate that is reported
CLEAR = f"clear of 0 and at least {100 * MIN_CHANGE:g} points"
MIN_PROBES = 6
MIN_STANDING = 0.02  # smallest constant staleness that is reported

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
    "contexts": "the policy visits other contexts, easier or harder to draft for than entropy predicts",
    "staleness": "the engines' weights lag further behind than at first",
}
ENTROPY_HINT = (
    "nothing is broken; spec.mode=rejection with a draft trained by draft.objective=e2e_tv loses least when "
    "entropy rises"
)


def explain_acceptance(run: RunData) -> Finding | None:
    """Explain the change of a run's acceptance; None for a run without drafts, or a very short one."""
    splits = of_run(run)
    missing, hint = missing_probes(run, splits)
    at_depth_1, overall = splits.at(1), splits.at(OVERALL)

    # Only probes in both spans tell the fit of the draft from other contexts.
    if at_depth_1 is not None and splits.probes() and "contexts" in at_depth_1.parts:
        finding = _explain_by_probes(run, at_depth_1, splits)
        if missing and finding.name != "nothing":
            finding = replace(finding, text=f"{finding.text} {missing}", hint=hint, sure=False)
        return finding
    if overall is None:
        return None
    return _explain_by_steps(overall, Setup.from_settings(run.settings), missing=missing, hint=hint)


def missing_probes(run: RunData, splits: AcceptanceSplit) -> tuple[str, str]:
    """Return a sentence on the probes that a certain cause still needs, and a hint; "" for none."""
    probes, settings = splits.probes(), (run.settings.get("metrics") or {}).get("probe") or {}
    if probes >= MIN_PROBES:
        return "", ""

    every, planned = settings.get("every", ProbeConfig().every), run.planned_steps or 0
    needed = f"A certain cause needs {MIN_PROBES} probes, and there are {probes}"
    if not every:
        return f"{needed}.", f"set metrics.probe.every={ProbeConfig().every}"
    if not probes and run.steps:
        needs = "rollout.temperature above 0 and spec.mode=rejection or target_only"
        return f"{needed}: a probe with staleness needs {needs}.", ""

    # The last step of a run is probed, too, but only if the run is not made longer before it.
    more = MIN_PROBES - probes
    step = step_of_probe(more, after=run.steps, every=every, last_step=planned)
    if step > planned:
        step = step_of_probe(more, after=run.steps, every=every)
    longer = f"set run.steps={step} and " if step > planned else ""
    return (
        f"{needed}; there will be {MIN_PROBES} by step {step} (metrics.probe.every={every}).",
        f"{longer}continue this run to step {step}: the cause is certain only with {MIN_PROBES} probes",
    )


def excursion(run: RunData, split: Split, splits: AcceptanceSplit) -> str:
    """Describe a temporary change of the rate at depth 1 between early and late steps; "" if there is none.

    split: the split between early and late steps. splits: the splits at every step.
    """
    steps, values = run.series("spec/acceptance_rate/depth_1")
    rate, count = np.array(values), len(values)
    width = max(3, min(5, count // 6))
    if count < 4 * width:
        return ""

    # Noise is relative to a line in each window, so that drift and the excursion do not count as noise.
    residuals = [detrended(rate[k : k + width]) for k in range(0, count - width + 1, width)]
    freedom = sum(len(r) - 2 for r in residuals)
    r = autocorrelation(detrended(rate[: split.early[1]]))
    variance = sum(float(e @ e) for e in residuals) / freedom * (1 + r) / (1 - r)
    # The extreme of many windows is large by chance, so the level is corrected for their number.
    quantile = t_quantile(1 - 0.025 * width / count, freedom)

    def since(mean: float, end: np.ndarray) -> Interval:
        half_width = quantile * sqrt(variance * (1 / width + 1 / len(end)))
        change = mean - float(end.mean())
        return Interval(change, change - half_width, change + half_width)

    spans = [rate[[low <= step <= high for step in steps]] for low, high in (split.early, split.late)]
    means = np.convolve(rate, np.full(width, 1 / width), "valid")
    turns = []
    for at in (int(means.argmin()), int(means.argmax())):
        went, back = (since(float(means[at]), span) for span in spans)
        if _is_clear(went) and _is_clear(back) and went.value * back.value > 0:
            turns.append((min(abs(went.value), abs(back.value)), at, went, back))
    if not turns:
        return ""

    _, at, went, back = max(turns)
    direction, return_ = ("fell", "rose") if went.value < 0 else ("rose", "fell")
    return (
        f"In between it {direction} to {means[at]:.3f} (steps {steps[at]} to {steps[at + width - 1]}, "
        f"{points(went)} since the first span) and {return_} again ({points(back.times(-1))} to the "
        f"last): the ends do not show that.{_parts_at(splits, steps[at + width - 1])}"
    )


def _parts_at(splits: AcceptanceSplit, step: int) -> str:
    """Name the parts of the change up to `step` that are clear of 0 and large enough."""
    split = splits.at(1, step)
    clear = {n: p for n, p in split.causes().items() if _is_clear(p)} if split is not None else {}
    listed = "; ".join(f"{PART_NAMES[name]} {points(part)}" for name, part in clear.items())
    return f" Its parts at step {step} that are {CLEAR}: {listed or 'none'}." if split is not None else ""


# --- with a probe set ------------------------------------------------------------------------------


def _explain_by_probes(run: RunData, split: Split, splits: AcceptanceSplit) -> Finding:
    """Name the part of the split that explains the change, or state that no part certainly explains it."""
    setup, causes = Setup.from_settings(run.settings), split.causes()
    head = f"Acceptance at depth 1 {_moved(split.total)} {_spans(split)}"
    remark = " ".join(filter(None, (_which_slope(split), excursion(run, split, splits))))

    clear = [name for name, part in causes.items() if _is_clear(part)]
    if not clear:
        return _no_cause(split, splits.standing_staleness(), setup, head, remark=remark)

    first = max(clear, key=lambda name: abs(causes[name].value))
    part = causes[first]
    name = {"mismatch": "draft_training" if setup.online else "draft_stale"}.get(first, first)
    lead = ":" if _is_clear(split.total) else "; yet its parts moved, and cancel:"

    # Another part of nearly the same size makes it uncertain that the largest part is the cause.
    rivals = [n for n in causes if n != first and abs(causes[n].value) > 0.7 * abs(part.value)]
    return Finding(
        name=name,
        text=f"{head}{lead} {CLAIMS[name]}. {_listed(causes)} {remark}".strip(),
        hint=_hint(name, setup, _points_back(run, part, setup.gamma)) if part.value < 0 else "",
        sure=not rivals,
    )


def _no_cause(split: Split, standing: Interval | None, setup: Setup, head: str, *, remark: str) -> Finding:
    """Return the finding if no part is clear: a constant staleness, no change, or an unexplained change."""
    if standing is not None and standing.clear and standing.value <= -MIN_STANDING:
        text = (
            f"{head}, but throughout engines kept {points(standing)} next to what the newest weights "
            "would have: a constant staleness, which does not appear as a change."
        )
        return Finding(name="standing_staleness", text=text, hint=staleness_hint(setup))

    listed = f"{_listed(split.causes())} {remark}".strip()
    if _is_clear(split.total):
        text = f"{head}. No single part is both {CLEAR}, so none is named. {listed}"
        return Finding(name="unsettled", text=text, sure=False)
    return Finding(name="nothing", text=f"{head}. No part is both {CLEAR}. {listed}", sure=False)


# --- without a probe set ---------------------------------------------------------------------------


def _explain_by_steps(split: Split, setup: Setup, *, missing: str, hint: str) -> Finding:
    """Explain without probes: report whether entropy changed at the same time, but name no cause.

    missing, hint: see `missing_probes`.
    """
    head = f"Acceptance, all depths, {_moved(split.total)} {_spans(split)}"
    if not _is_clear(split.total):
        return Finding(name="nothing", text=f"{head}.", sure=False)

    by_slope = "; ".join(
        f"slope {_per_nat(split.slopes[name])} {name} leaves {points(rest)}"
        for name, rest in split.rests.items()
    )
    head += f", while entropy moved by {split.entropy_change:+.3f} nat: {by_slope}. "

    if (
        all(rest.clear for rest in split.rests.values())
        and len({r.value > 0 for r in split.rests.values()}) == 1
    ):
        text = f"{head}More changed than entropy explains. Steps cannot show what: probes can. {missing}"
        return Finding(name="unexplained", text=text.strip(), hint=hint, sure=False)
    alongs = [slope.times(split.entropy_change) for slope in split.slopes.values()]
    if all(along.clear and abs(along.value) > abs(split.total.value) / 2 for along in alongs):
        text = f"{head}Entropy may account for all of it; without probes that is not settled. {missing}"
        return Finding(name="entropy", text=text.strip(), hint=_entropy_hint(setup), sure=False)
    text = f"{head}These steps cannot settle it. {missing}".strip()
    return Finding(name="unsettled", text=text, hint=hint, sure=False)


# --- hints and phrases -----------------------------------------------------------------------------


def _hint(name: str, setup: Setup, worth: str) -> str:
    """Return the setting to change for a cause. worth: text on a better draft's gain, see `_points_back`."""
    hints = {
        "staleness": staleness_hint(setup),
        "entropy": _entropy_hint(setup),
        "draft_stale": f"set draft.train=online, or adapt the draft again (recipe mtp_adapt){worth}",
        "draft_training": "raise draft.lr, or adapt the draft anew with another draft.objective: its "
        f"training does not keep up{worth}",
        "contexts": f"adapt the draft on what the policy now visits (recipe mtp_adapt){worth}",
    }
    learned = name in ("draft_stale", "draft_training", "contexts")
    return LOOKUP_HINT if setup.lookup and learned else hints[name]


def _entropy_hint(setup: Setup) -> str:
    """Return the settings that lose least when entropy rises; "" if the run has them."""
    best = setup.mode == "rejection" and setup.online and setup.objective == "e2e_tv"
    return "" if best else ENTROPY_HINT


def _points_back(run: RunData, lost: Interval, gamma: int) -> str:
    """Describe the gain of a draft that restores the lost points; "" if the gain cannot be computed."""
    gain = length_gain(run, -lost.value, gamma)
    if not gain:
        return ""
    gained = points(Interval(-lost.value, -lost.high, -lost.low))
    return f", worth about {gain:.0%} tokens per verify step if it gives back {gained}"


def length_gain(run: RunData, points_back: float, gamma: int) -> float:
    """Return the relative gain of tokens per verify step if every depth's rate rises by `points_back`."""
    rate = run.series("spec/acceptance_rate/depth_1")[1][-10:] or run.series("spec/acceptance_rate")[1][-10:]
    if not rate:
        return 0.0

    now = float(np.mean(rate))
    then = min(1.0, now + points_back)
    return sum(then**k for k in range(gamma + 1)) / sum(now**k for k in range(gamma + 1)) - 1


def _which_slope(split: Split) -> str:
    name, slope = next(iter(split.slopes.items()))
    if name != "measured by intervention":
        return ""
    return (
        f"Entropy counts by the slope measured by intervention, {_per_nat(slope)}, not by those "
        "of the run, which also hold what changed with entropy."
    )


def _spans(split: Split) -> str:
    """Name the two spans that the split compares."""
    (a, b), (c, d) = split.early, split.late
    return f"from steps {a}-{b} to {c}-{d}"


def _listed(causes: Mapping[str, Interval]) -> str:
    return f"In parts (95%): {'; '.join(f'{PART_NAMES[n]} {points(p)}' for n, p in causes.items())}."


def points(part: Interval) -> str:
    """Format an interval in points of the rate.

    >>> points(Interval(-0.031, -0.04, -0.022))
    '-3.1 [-4.0, -2.2] points'
    """
    return f"{100 * part.value:+.1f} [{100 * part.low:+.1f}, {100 * part.high:+.1f}] points"


def _per_nat(slope: Interval) -> str:
    return f"{slope.value:+.3f} [{slope.low:+.3f}, {slope.high:+.3f}] per nat"


def _is_clear(part: Interval) -> bool:
    """Return whether a part's interval excludes 0 and it is large enough to be reported."""
    return part.clear and abs(part.value) >= MIN_CHANGE


def _moved(change: Interval) -> str:
    if not _is_clear(change):
        hardly = f"moved by less than {100 * MIN_CHANGE:g} points"
        return f"{hardly if change.clear else 'did not move beyond chance'} ({points(change)})"
    size, ends = 100 * abs(change.value), sorted((100 * abs(change.low), 100 * abs(change.high)))
    return f"{'rose' if change.value > 0 else 'fell'} by {size:.1f} [{ends[0]:.1f}, {ends[1]:.1f}] points"
