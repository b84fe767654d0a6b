"""The plots of the report, as plotly figure dicts.

Owns the choice of plots and their captions. Plots of metrics over steps are declared in plots.toml; plots of
acceptance are in figures_acceptance.py, and plots of adaptation in figures_adapt.py. A page about one run has
a colour per series, and a page about several runs a colour per run, so that a colour always means one thing
on the page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from rlpipe.diagnosis.held_out import primary_split, reward_intervals, splits
from rlpipe.diagnosis.seeds import pool_seeds
from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import (
    ACCEPTANCE,
    COLOURS,
    NAMES_AXIS,
    SECTIONS,
    SPEED,
    Figure,
    bars,
    line,
    line_with_errors,
    smooth,
)
from rlpipe.report.figures_acceptance import acceptance_figures
from rlpipe.report.figures_adapt import adaptation_figures
from rlpipe.report.figures_breakdown import breakdown_figures

MAX_POINTS = 250  # maximum number of points of a curve
SMALL = 0.01  # a phase with a smaller share of the step counts as "other"
STEP_PHASES = (  # (metric, label, colour); they run one after another; the remaining time is "other"
    ("timing_s/wait_rollout", "wait for rollouts", 0),
    ("timing_s/adv", "advantages", 3),
    ("timing_s/update_actor", "update", 4),
    ("timing_s/wait_weights", "weight sync", 5),
)


def _plots() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("plots.toml").read_text("utf-8"))["plots"]


def window(runs: Sequence[RunData]) -> int:
    """Return the number of steps per point of a plot: 1, or more if a run has over MAX_POINTS steps."""
    return max(1, ceil(max((run.steps for run in runs), default=0) / MAX_POINTS))


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return every plot that has data; the seeds of a configuration are plotted as their mean."""
    runs = pool_seeds(runs)

    # Plot long runs in windows of steps, but analyse acceptance with every step.
    by_step = runs
    if (steps := window(runs)) > 1:
        runs = [run.coarse(steps) for run in runs]

    built = [_reward(runs), _entropy_and_acceptance(runs), *acceptance_figures(runs, by_step), _timing(runs)]
    built += adaptation_figures(runs)
    built += [_lines(plot, runs) for plot in [*_info_plots(runs), *_plots()]]
    if any((run.path / "rollouts").is_dir() for run in by_step):
        built += breakdown_figures(by_step)

    shown = [figure for figure in built if figure.traces]
    return sorted(shown, key=lambda figure: SECTIONS.index(figure.section))


def _reward(runs: Sequence[RunData]) -> Figure:
    """Plot training and held-out rewards."""
    traces = []
    one = len(runs) == 1
    for n, run in enumerate(runs):
        label = "" if one else f"{run.name}: "
        steps, values = run.series("critic/rewards/mean")
        if steps:
            faint = {"color": f"${n}a", "width": 1}
            if one:
                traces.append(line((steps, values), "train", n, line=faint, hoverinfo="skip"))
            traces.append(line((steps, smooth(values)), f"{label}train" + (", smoothed" if one else ""), n))

            # With several runs, each has one colour: solid for held-out rewards, dotted for training.
            if not one:
                traces[-1]["line"] = {"color": f"${n}", "width": 1.5, "dash": "dot"}

        primary = primary_split(run).replace("_", " ")
        sets = [
            ("val", f"held-out: {primary}" if primary else "held-out"),
            *((f"val/{s}", s.replace("_", " ")) for s in splits(*runs)),
        ]
        for m, (prefix, set_name) in enumerate(sets if one else sets[:1], 1):
            traces += reward_line(run, f"{prefix}/reward", f"{label}{set_name}", colour=n + m if one else n)

    return Figure(
        title="Reward",
        note="Held-out points carry 95% intervals: Wilson's, instances counted as clusters"
        + ("; over seeds for the mean of several." if any(run.seeds for run in runs) else "."),
        traces=traces,
        layout={"yaxis": {"title": {"text": "reward"}, "rangemode": "tozero"}, "height": 380},
        wide=True,
    )


def _entropy_and_acceptance(runs: Sequence[RunData]) -> Figure:
    """Plot entropy above acceptance on one x axis: acceptance follows entropy unless the draft drifts."""
    traces = []
    one = len(runs) == 1
    for n, run in enumerate(runs):
        label = "" if one else run.name
        entropy = run.series("rollout/entropy")
        if entropy[0]:
            traces.append(line(entropy, label or "entropy", n, yaxis="y2", legendgroup=label or "entropy"))

        depths = [d for d in run.names() if d.startswith("spec/acceptance_rate/depth_")]
        if one:
            for k, name in enumerate(sorted(depths, key=lambda d: int(d.rsplit("_", 1)[1])), 1):
                traces.append(line(run.series(name), f"depth {name.rsplit('_', 1)[1]}", k))
        elif run.series("spec/acceptance_rate")[0]:
            traces.append(
                line(
                    run.series("spec/acceptance_rate"), label, n, legendgroup=label, showlegend=not entropy[0]
                )
            )

    title, section = "Entropy", "Training"
    note = "Of the target, per sampled token. A collapse towards 0 ends exploration."
    layout: dict[str, Any] = {"yaxis2": {"title": {"text": "entropy (nat)"}, "rangemode": "tozero"}}

    if any("yaxis" not in trace for trace in traces):
        title, section = "Entropy and acceptance", ACCEPTANCE
        note = (
            "From the same tokens, on one axis. Where acceptance falls and entropy does not, it is the "
            "draft, staleness or other prompts: the summary names it, as far as this run's data allow."
        )
        layout["yaxis2"]["domain"] = [0.56, 1]
        layout |= {"height": 460, "yaxis": {"domain": [0, 0.47], "title": {"text": "acceptance rate"}}}
    else:
        # Without draft tokens, entropy takes the full height.
        for trace in traces:
            del trace["yaxis"]
        layout = {"yaxis": layout["yaxis2"]}

    return Figure(title=title, note=note, traces=traces, layout=layout, wide=True, section=section)


def _lines(plot: dict[str, Any], runs: Sequence[RunData]) -> Figure:
    """Draw a plot from plots.toml; with several runs, draw only its first metric."""
    title, metrics = plot["title"], plot["metrics"]
    (first, first_label), one = metrics[0], len(runs) == 1
    shown = [(runs[0], *metric) for metric in metrics] if one else [(run, first, run.name) for run in runs]
    series = [(n, run.series(name), label) for n, (run, name, label) in enumerate(shown)]

    axis = {"title": {"text": plot["unit"]}} | ({"rangemode": "tozero"} if plot["from_zero"] else {})
    return Figure(
        title=title if one or len(metrics) == 1 else f"{title}: {first_label}",
        note=plot["note"],
        traces=[line(points, label, n) for n, points, label in series if points[0]],
        layout={"yaxis": axis},
        section=plot["section"],
    )


def _info_plots(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a plot, in the format of plots.toml, for each number that environments returned in `info`."""
    names = sorted({name for run in runs for name in run.names()})
    curves: dict[str, list[tuple[str, str]]] = {}
    for metric in names:
        if metric.startswith("env/info/"):
            curves.setdefault(metric.removeprefix("env/info/"), []).insert(0, (metric, "training"))
        elif match := re.fullmatch(r"val/([^/]+)/info/([^/]+)", metric):
            curves.setdefault(match[2], []).append((metric, match[1].replace("_", " ")))

    note = "Mean over trajectories of a number that the environment gives in info."
    shared = {"note": note, "section": "Training", "unit": "mean", "from_zero": False}
    return [{"title": name, "metrics": metrics, **shared} for name, metrics in curves.items()]


def _timing(runs: Sequence[RunData]) -> Figure:
    """Plot the seconds of each phase of a step, stacked."""
    if len(runs) > 1:
        return _timing_of_runs(runs)

    run = runs[0]
    step_seconds = dict(zip(*run.series("timing_s/step"), strict=True))
    steps = sorted(step_seconds)
    remaining = dict(step_seconds)
    traces = []

    # Subtract each phase from the step; the remaining time is "other".
    for name, label, colour in STEP_PHASES:
        phase = dict(zip(*run.series(name), strict=True))
        if not steps or sum(phase.values()) < SMALL * sum(step_seconds.values()):
            continue
        remaining = {s: remaining[s] - phase.get(s, 0.0) for s in steps}
        traces.append(_area((steps, [phase.get(s, 0.0) for s in steps]), label, colour))

    if traces:
        traces.append(_area((steps, [max(0.0, remaining[s]) for s in steps]), "other", COLOURS - 1))

    if (gen := run.series("timing_s/gen"))[0]:
        traces.append(line(gen, "one group's generation", 2, line={"color": "$text", "dash": "dot"}))

    return Figure(
        title="Where a step's time goes",
        note="The trainer's phases add up to the step; generation (dotted) runs in parallel if asynchronous.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}, "height": 320},
        section=SPEED,
    )


def _area(points: tuple[list[int], list[float]], name: str, colour: int) -> dict[str, Any]:
    slot = f"${colour % COLOURS}"
    return line(points, name, colour, stackgroup="step", line={"width": 0.5}, fillcolor=slot)


def _timing_of_runs(runs: Sequence[RunData]) -> Figure:
    """Plot the mean seconds of each phase of a step, with a bar for each run."""
    names = ("timing_s/step", *(name for name, _, _ in STEP_PHASES))
    means = [{name: _mean(run.series(name)[1]) for name in names} for run in runs]
    labels = [run.name for run in runs]

    # A phase that is small in every run is part of "other".
    shown = [p for p in STEP_PHASES if any(m[p[0]] > SMALL * m["timing_s/step"] for m in means)]
    traces = [
        bars(label, n, labels, values=[m[name] for m in means], across=True) for name, label, n in shown
    ]

    if traces:
        other = [max(0.0, m["timing_s/step"] - sum(m[name] for name, _, _ in shown)) for m in means]
        traces.append(bars("other", COLOURS - 1, labels, values=other, across=True))

    return Figure(
        title="Where a step's time goes",
        note="Mean seconds of a step, by phase of the trainer.",
        traces=traces,
        layout={
            "barmode": "stack",
            "hovermode": "closest",
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": dict(NAMES_AXIS),
        },
        section=SPEED,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reward_line(run: RunData, name: str, label: str, *, colour: int) -> list[dict[str, Any]]:
    """Draw the curve of a held-out reward, with the interval of each value."""
    traces = line_with_errors(run, name, label, colour=colour)
    for trace in traces:
        intervals = reward_intervals(run, name)
        above, below = [i.high - i.value for i in intervals], [i.value - i.low for i in intervals]
        trace["error_y"] |= {"symmetric": False, "array": above, "arrayminus": below}
    return traces
