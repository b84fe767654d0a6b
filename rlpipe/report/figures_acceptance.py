"""The plots of acceptance: by depth, against entropy, and why it moved (Bebop Fig. 2, 8 and 3).

Owns these figures; `diagnosis` computes the decomposition and the fit. numpy is imported only if a run has
draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import ACCEPTANCE, COLOURS, DASHES, NAMES_AXIS, WHY, Figure, bars, line, short

if TYPE_CHECKING:
    from rlpipe.diagnosis.decomposition import Decomposition
    from rlpipe.metrics.statistics import Estimate

PARTS = (("total", "change", 6), ("entropy", "along the slope", 1), ("mismatch", "the rest", 2))
CAUSES = (
    ("total", "change", 6),
    ("entropy", "entropy", 1),
    ("mismatch", "draft mismatch", 2),
    ("staleness", "staleness", 0),
    ("contexts", "other contexts", 3),
)
DOTS = 250  # of a run in a scatter plot
RATE, LENGTH, ENTROPY = "spec/acceptance_rate", "spec/acceptance_length", "rollout/entropy"


def acceptance_figures(runs: Sequence[RunData], by_step: Sequence[RunData]) -> list[Figure]:
    """Return the plots of acceptance that have data.

    runs: as plotted, in windows of steps if they are long. by_step: the same runs with a record per step.
    """
    drafted = [run for run in by_step if len(run.series(RATE)[0]) > 1]
    if not drafted:
        return []

    figures = [_by_depth(runs)] if len(runs) > 1 else []
    return [*figures, _against_entropy(by_step), _accepted(by_step), *_why(by_step)]


def _by_depth(runs: Sequence[RunData]) -> Figure:
    """Draw Fig. 2: a colour per run, a dash per depth."""
    traces = []
    for n, run in enumerate(runs):
        names = [name for name in run.names() if name.startswith(f"{RATE}/depth_")]
        for name in sorted(names, key=lambda name: int(name.rsplit("_", 1)[1])):
            depth = int(name.rsplit("_", 1)[1])
            style = {"width": 1.8, "dash": DASHES[(depth - 1) % len(DASHES)]}
            traces.append(line(run.series(name), f"{run.name}, depth {depth}", n, line=style))
            traces[-1] |= {"legendgroup": run.name, "showlegend": depth == 1}
    return Figure(
        title="Acceptance by depth",
        note="Conditional on the depths before it. Solid, dashed, dotted: depth 1, 2, 3. "
        "Later depths degrade first.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "acceptance rate"}}, "height": 340},
        section=ACCEPTANCE,
    )


def _against_entropy(runs: Sequence[RunData]) -> Figure:
    """Draw Fig. 8: a point per step and the linear fit of each run."""
    from rlpipe.diagnosis.decomposition import paired
    from rlpipe.diagnosis.regression import robust_slope

    traces: list[dict[str, Any]] = []
    for n, run in enumerate(runs):
        steps, length, entropy = paired(run, LENGTH, ENTROPY)
        if len(steps) < 3:
            continue

        # Thin the dots of a long run; the fit below uses every step.
        label = run.name if len(runs) > 1 else "step"
        stride = ceil(len(steps) / DOTS)
        dots = {"color": f"${n % COLOURS}", "size": 5, "opacity": 0.45}
        points = ([short(x) for x in entropy[::stride]], list(length[::stride]))
        traces.append(line(points, label, n, mode="markers", marker=dots, legendgroup=run.name))
        traces[-1] |= {
            "text": [f"step {step:.0f}" for step in steps[::stride]],
            "hovertemplate": "%{text}: %{x:.3f} nat, %{y:.2f} tokens",
        }

        try:
            slope = robust_slope(entropy, length, trend=False)
        except ValueError:  # the entropy does not vary: there is no line to draw
            continue

        at_zero = median(length - slope.value * entropy)
        ends = [float(entropy.min()), float(entropy.max())]
        fit = ([short(x) for x in ends], [at_zero + slope.value * x for x in ends])
        fit_label = f"slope {slope.value:+.2f} ± {slope.se:.2f} tokens / nat"
        name = f"{run.name}: {fit_label}" if len(runs) > 1 else fit_label
        traces.append(line(fit, name, n, legendgroup=run.name, hoverinfo="skip"))

    return Figure(
        title="Acceptance length against entropy",
        note="A point is a step, the line a robust fit (± standard error). A draft that fits its target well "
        "under rejection sampling hardly loses when entropy rises: the line is flat.",
        traces=traces,
        layout={
            "hovermode": "closest",
            "xaxis": {"title": {"text": "entropy of the target (nat)"}},
            "yaxis": {"title": {"text": "tokens per verify step"}},
            "height": 340,
        },
        section=ACCEPTANCE,
    )


def _accepted(runs: Sequence[RunData]) -> Figure:
    """Draw the number of draft tokens that a verify step accepts, over the full run."""
    traces = []
    for n, run in enumerate(runs):
        counts: dict[float, float] = {}
        for record in run.records:
            histogram = record.get("spec/num_accepted")
            if isinstance(histogram, dict):
                for accepted, count in enumerate(histogram["counts"]):
                    counts[accepted] = counts.get(accepted, 0.0) + count

        # Shares, because runs differ in the number of their verify steps.
        if total := sum(counts.values()):
            traces.append(
                bars(run.name, n, list(counts), values=[count / total for count in counts.values()])
            )

    return Figure(
        title="Drafts kept by a verify step",
        note="Share of the verify steps of the run. Many that keep all: a larger gamma may pay.",
        traces=traces,
        layout={
            "hovermode": "closest",
            "xaxis": {"title": {"text": "drafts kept"}, "dtick": 1},
            "yaxis": {"title": {"text": "share of verify steps"}, "rangemode": "tozero"},
        },
        section=ACCEPTANCE,
    )


def _why(runs: Sequence[RunData]) -> list[Figure]:
    """Draw Fig. 3, the change since the early phase. One run: over time and by depth; several: at the end."""
    from rlpipe.diagnosis.decomposition import decompose_run

    attributed = [_attributed(runs)] if any((run.path / "probe").is_dir() for run in runs) else []
    ends: dict[str, dict[str, Decomposition]] = {}
    for run in runs:
        try:
            ends[run.name] = decompose_run(run)
        except ValueError:
            # The entropy does not vary, so no change can be attributed to it.
            ends[run.name] = {}

    if len(runs) > 1:
        rows = {name: split["overall"] for name, split in ends.items() if "overall" in split}
        return [*([_parts(rows, "Change of the acceptance rate, by run")] if rows else []), *attributed]

    (split,) = ends.values()
    if not split:
        return attributed
    parts = _parts(split, "Change of the acceptance rate, by depth")
    return [_over_time(runs[0], split["overall"]), parts, *attributed]


def _attributed(runs: Sequence[RunData]) -> Figure:
    """Draw the change at depth 1 in four parts that add up, separated with the help of the probe set."""
    from rlpipe.diagnosis.fixed_contexts import attribute_run

    rows: dict[str, dict[str, Estimate]] = {}
    for run in runs:
        try:
            attribution = attribute_run(run)
        except ValueError:  # the entropy does not vary over the contexts
            continue
        if attribution is not None:
            rows[run.name] = {"total": attribution.total, **attribution.parts()}

    causes = [(name, label, colour) for name, label, colour in CAUSES if rows]
    return Figure(
        title="What moved acceptance",
        note="Change at depth 1 from the first to the last probes, in parts that add up, with 99% intervals: "
        "the target's entropy, a draft that fits its target less, the versions in between, other contexts.",
        traces=[
            _bars([row[name] for row in rows.values()], list(rows), label, colour=colour)
            for name, label, colour in causes
        ],
        layout=_bar_layout(len(rows), len(CAUSES)),
        section=WHY,
    )


def _over_time(run: RunData, end: Decomposition) -> Figure:
    from rlpipe.diagnosis.decomposition import split_over_time

    windows = split_over_time(run, end)
    steps = [window.window[1] for window in windows]
    traces = [
        line((steps, [getattr(window, name).value for window in windows]), label, colour)
        for name, label, colour in PARTS
    ]

    slope = end.slope
    return Figure(
        title="Change of the acceptance rate since the early phase",
        note=f"Split by Bebop Eq. 16 with a slope of {slope.value:+.3f} ± {slope.se:.3f} per nat from steps "
        f"{end.early[0]} to {end.early[1]}, one of several: the summary says what holds whichever is "
        "right. The rest may be the draft, staleness, or prompts whose slope is another.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "change of the rate"}}},
        section=WHY,
    )


def _parts(rows: dict[str, Decomposition], title: str) -> Figure:
    """Draw horizontal bars with intervals, a group per row."""
    labels = list(rows)
    traces = []
    for name, label, colour in PARTS:
        estimates = [getattr(part, name) for part in rows.values()]
        traces.append(_bars(estimates, labels, label, colour=colour))

    level = next(iter(rows.values())).total.level
    return Figure(
        title=title,
        note=f"Change between the early phase and the last steps, with {level:.0%} intervals.",
        traces=traces,
        layout=_bar_layout(len(labels), len(PARTS)),
        section=WHY,
    )


def _bars(estimates: Sequence[Estimate], labels: list[str], name: str, *, colour: int) -> dict[str, Any]:
    """Draw one part of every row, with its interval."""
    # An interval without bounds cannot be drawn.
    errors = [e.half_width if isfinite(e.half_width) else 0.0 for e in estimates]
    return bars(name, colour, labels, values=[e.value for e in estimates], errors=errors, across=True)


def _bar_layout(rows: int, parts: int) -> dict[str, Any]:
    return {
        "barmode": "group",
        "hovermode": "closest",
        "height": 130 + (10 + 18 * parts) * rows,
        "xaxis": {"title": {"text": "change of the acceptance rate"}},
        "yaxis": dict(NAMES_AXIS),
    }
