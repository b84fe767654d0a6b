"""The plots of acceptance: by depth, against entropy, and the causes of its change (Bebop Fig. 2, 8 and 3).

Owns these figures; `diagnosis` splits the change into its causes and fits the lines. numpy is imported only
if a run has draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import ACCEPTANCE, COLOURS, DASHES, NAMES_AXIS, WHY, Figure, bars, line, short

if TYPE_CHECKING:
    from rlpipe.diagnosis.acceptance_split import AcceptanceSplit, Split
    from rlpipe.metrics.statistics import Interval

PARTS = (
    ("total", "change", 6),
    ("entropy", "entropy", 1),
    ("mismatch", "fit of the draft", 2),
    ("staleness", "staleness", 0),
    ("contexts", "other contexts", 3),
)
DOTS = 250  # maximum number of dots of a run in a scatter plot
RATE, LENGTH, ENTROPY = "spec/acceptance_rate", "spec/acceptance_length", "rollout/entropy"


def acceptance_figures(runs: Sequence[RunData], by_step: Sequence[RunData]) -> list[Figure]:
    """Return the plots of acceptance that have data.

    runs: the runs to plot; long runs are averaged in windows of steps. by_step: the same runs with a record
    per step.
    """
    drafted = [run for run in by_step if len(run.series(RATE)[0]) > 1]
    if not drafted:
        return []

    figures = [_by_depth(runs)] if len(runs) > 1 else []
    return [*figures, _against_entropy(by_step), _accepted(by_step), *_why(by_step)]


def _by_depth(runs: Sequence[RunData]) -> Figure:
    """Draw Fig. 2, with a colour per run and a dash style per depth."""
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

        # Draw only some dots of a long run; the fit below uses every step.
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
        except ValueError:  # no line, because the entropy is constant
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
    """Draw the distribution of the number of draft tokens that a verify step accepts, over the full run."""
    traces = []
    for n, run in enumerate(runs):
        counts: dict[float, float] = {}
        for record in run.records:
            histogram = record.get("spec/num_accepted")
            if isinstance(histogram, dict):
                for accepted, count in enumerate(histogram["counts"]):
                    counts[accepted] = counts.get(accepted, 0.0) + count

        # Plot shares, because the runs have different numbers of verify steps.
        if total := sum(counts.values()):
            traces.append(
                bars(run.name, n, list(counts), values=[count / total for count in counts.values()])
            )

    return Figure(
        title="Drafts accepted by a verify step",
        note="Share of the verify steps of the run. If many steps accept all drafts, a larger gamma may pay.",
        traces=traces,
        layout={
            "hovermode": "closest",
            "xaxis": {"title": {"text": "drafts accepted"}, "dtick": 1},
            "yaxis": {"title": {"text": "share of verify steps"}, "rangemode": "tozero"},
        },
        section=ACCEPTANCE,
    )


def _why(runs: Sequence[RunData]) -> list[Figure]:
    """Draw Fig. 3, the change of acceptance since the early phase of the run.

    For one run, return a plot over time and a plot by depth; for several runs, one plot of their last steps.
    """
    from rlpipe.diagnosis.acceptance_split import OVERALL, of_run

    splits = {run.name: of_run(run) for run in runs}
    ends = {name: [(d, split) for d in s.depths if (split := s.at(d))] for name, s in splits.items()}

    if len(runs) > 1:
        rows = {name: at[0][1] for name, at in ends.items() if at and at[0][0] == OVERALL}
        return [_parts(rows, "Change of the acceptance rate, by run")] if rows else []

    ((run, at),) = ((run, ends[run.name]) for run in runs)
    if not at:
        return []
    rows = {f"depth {depth}" if depth else "overall": split for depth, split in at}
    return [_over_time(run, splits[run.name]), _parts(rows, "Change of the acceptance rate, by depth")]


def _over_time(run: RunData, splits: AcceptanceSplit) -> Figure:
    """Draw the change of the overall rate and its parts at every step, as recorded by the run."""
    steps = run.series(RATE)[0]
    stride = ceil(len(steps) / DOTS)
    shown = [split for step in steps[::-stride][::-1] if (split := splits.at(0, step))]

    traces = []
    for name, label, colour in PARTS:
        points = [(split.late[1], split.parts[name]) for split in shown if name in split.parts]
        if points:
            values = ([step for step, _ in points], [part.value for _, part in points])
            traces.append(line(values, label, colour))

    last = shown[-1]
    source, slope = next(iter(last.slopes.items()))
    return Figure(
        title="Change of the acceptance rate since the early phase",
        note=f"All depths; acceptance_split/* of the run. The mean of the last {splits.window} steps against "
        f"steps {last.early[0]} to {last.early[1]}; entropy counts by {slope.value:+.3f} "
        f"[{slope.low:+.3f}, {slope.high:+.3f}] per nat, {source}. Parts add up to the change.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "change of the rate"}}},
        section=WHY,
    )


def _parts(rows: dict[str, Split], title: str) -> Figure:
    """Draw horizontal bars with intervals, a group per row; omit parts that a row does not have."""
    traces = []
    for name, label, colour in PARTS:
        having = {row: split.parts[name] for row, split in rows.items() if name in split.parts}
        if having:
            traces.append(_bars(list(having.values()), list(having), label, colour=colour))

    split = next(iter(rows.values()))
    spans = f"from steps {split.early[0]}-{split.early[1]} to {split.late[0]}-{split.late[1]}"
    return Figure(
        title=title,
        note=f"{'Change ' + spans if len({(s.early, s.late) for s in rows.values()}) == 1 else 'Change'}, "
        "with 95% intervals: the last acceptance_split/* of the run, and the numbers of the summary. "
        "An interval holds whichever slope is right.",
        traces=traces,
        layout=_bar_layout(len(rows), len(traces)),
        section=WHY,
    )


def _bars(parts: Sequence[Interval], labels: list[str], name: str, *, colour: int) -> dict[str, Any]:
    """Draw the bars of one part, with intervals that may be asymmetric."""
    trace = bars(
        name, colour, labels, values=[p.value for p in parts], errors=[0.0] * len(parts), across=True
    )
    above, below = [short(p.high - p.value) for p in parts], [short(p.value - p.low) for p in parts]
    trace["error_x"] |= {"symmetric": False, "array": above, "arrayminus": below}
    return trace


def _bar_layout(rows: int, parts: int) -> dict[str, Any]:
    """Return the layout of grouped bars: each is 18 pixels high, with 10 pixels between rows."""
    return {
        "barmode": "group",
        "hovermode": "closest",
        "height": 130 + (10 + 18 * parts) * rows,
        "xaxis": {"title": {"text": "change of the acceptance rate"}},
        "yaxis": dict(NAMES_AXIS),
    }
