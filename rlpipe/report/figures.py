"""The plots of the report, as plotly figure dicts.

Owns what is plotted and the words beside it; those of acceptance are in figures_acceptance.py, of adaptation
in figures_adapt.py. One run: a colour per series. Several: a colour per run, so that a colour always means
one thing on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import (
    ACCEPTANCE,
    COLOURS,
    SECTIONS,
    SPEED,
    Figure,
    line,
    line_with_errors,
    short,
    smooth,
)
from rlpipe.report.figures_acceptance import acceptance_figures
from rlpipe.report.figures_adapt import adaptation_figures
from rlpipe.report.figures_cuts import cut_figures

MAX_POINTS = 250  # of a curve
SMALL = 0.01  # share of the step below which a phase is not drawn apart from "other"
STEP_PHASES = (  # they follow one another in the trainer; the rest of the step is "other"
    ("timing_s/wait_rollout", "wait for rollouts"),
    ("timing_s/adv", "advantages"),
    ("timing_s/update_actor", "update"),
    ("timing_s/update_weights", "weight sync"),
)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Lines:
    """A plot of metrics over steps. metrics: (name, label); with several runs only the first is drawn."""

    title: str
    note: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    zero: bool = True
    section: str = "Training"


_LINES = (
    _Lines(
        title="Acceptance length",
        note="Tokens per verify step, bonus included. Decoding gets faster as it rises.",
        unit="tokens",
        metrics=(("spec/acceptance_length", "acceptance length"),),
        zero=False,
        section=ACCEPTANCE,
    ),
    _Lines(
        title="Rollout speed",
        note="Tokens an engine generates per second in which it is busy.",
        unit="tokens / s",
        metrics=(("perf/tokens_per_s/rollout", "rollout"),),
        section=SPEED,
    ),
    _Lines(
        title="Throughput",
        note="Tokens of the step's trajectories, context included, per second of the step.",
        unit="tokens / s",
        metrics=(("perf/throughput", "throughput"),),
        section=SPEED,
    ),
    _Lines(
        title="Utilisation",
        note="Share of the time in which rollout workers generate, environments work, the trainer trains. "
        "What is idle waits for another: the timeline (trace.json.gz, in Perfetto) says for which.",
        unit="share of the time",
        metrics=(
            ("perf/utilisation/rollout", "rollout"),
            ("perf/utilisation/trainer", "trainer"),
            ("perf/utilisation/env", "environment"),
            ("perf/rollout_utilization", "engine busy"),
        ),
        section=SPEED,
    ),
    _Lines(
        title="Speed-up by drafting",
        note="Time of decoding without drafts, by measured costs, over the time taken.",
        unit="times",
        metrics=(("spec/speedup_observed", "observed"), ("spec/speedup_predicted", "predicted")),
        zero=False,
        section=SPEED,
    ),
    _Lines(
        title="Staleness",
        note="How many versions the trained trajectories lag behind the trainer; bounded by "
        "pipeline.max_staleness.",
        unit="versions",
        metrics=(
            ("training/off_policy/trajectory_staleness/mean", "mean"),
            ("training/off_policy/trajectory_staleness/max", "max"),
        ),
    ),
    _Lines(
        title="Response length",
        note="Sampled tokens per trajectory. A sudden rise often means the policy stopped finishing.",
        unit="tokens",
        metrics=(("response_length/mean", "mean"), ("response_length/max", "max")),
    ),
    _Lines(
        title="Turns",
        note="Generated turns per trajectory.",
        unit="turns",
        metrics=(("num_turns/mean", "mean"), ("num_turns/max", "max")),
    ),
    _Lines(
        title="How trajectories end",
        note="Share that submitted, and share cut by a token or turn limit.",
        unit="share",
        metrics=(("env/submit_rate", "submitted"), ("env/truncated", "cut by a limit")),
    ),
    _Lines(
        title="What groups teach",
        note="A group whose rewards are all equal has no advantage: too easy, or too hard.",
        unit="share of groups",
        metrics=(
            ("env/no_signal", "no signal"),
            ("env/solve_all", "all solved"),
            ("env/solve_none", "none solved"),
        ),
    ),
    _Lines(
        title="Gradient norm",
        note="Before clipping. Spikes often precede a collapse.",
        unit="L2 norm",
        metrics=(("actor/grad_norm", "policy"), ("mtp/grad_norm", "draft")),
    ),
    _Lines(
        title="Policy change per step",
        note="Mean drop in logprob of the trained tokens (k1 estimate of the KL).",
        unit="nat",
        metrics=(("actor/ppo_kl", "update"), ("rollout_corr/kl", "rollout to trainer")),
    ),
    _Lines(
        title="Rollout against trainer",
        note="Mean difference of the probabilities that engine and trainer give the same tokens.",
        unit="probability",
        metrics=(("training/rollout_probs_diff_mean", "mean |difference|"),),
    ),
)


def window(runs: Sequence[RunData]) -> int:
    """Steps that one point of a plot stands for: 1, or more where a run has over MAX_POINTS steps."""
    return max(1, ceil(max((run.steps for run in runs), default=0) / MAX_POINTS))


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """Every plot for which there is data."""
    whole = runs
    if (steps := window(runs)) > 1:
        runs = [run.coarse(steps) for run in runs]
    built = [_reward(runs), _entropy_and_acceptance(runs), *acceptance_figures(runs, whole), _timing(runs)]
    built += adaptation_figures(runs)
    built += [_lines(chart, runs) for chart in _LINES]
    if any((run.path / "rollouts").is_dir() for run in whole):
        built += cut_figures(whole)
    drawn = [figure for figure in built if figure.traces]
    return sorted(drawn, key=lambda figure: SECTIONS.index(figure.section))


def _splits(runs: Sequence[RunData]) -> list[str]:
    """Held-out sets other than the one reported as val/reward."""
    names = {
        n.split("/")[1] for r in runs for n in r.names() if n.startswith("val/") and n.endswith("/reward")
    }
    primary = {s for s in names if all(_same(r, s) for r in runs)}
    return sorted(names - primary)


def _same(run: RunData, split: str) -> bool:
    return run.series(f"val/{split}/reward") == run.series("val/reward")


def _reward(runs: Sequence[RunData]) -> Figure:
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
            if not one:
                traces[-1]["line"] = {"color": f"${n}", "width": 1.5, "dash": "dot"}
        splits = [("val", "held-out"), *((f"val/{s}", s.replace("_", " ")) for s in _splits(runs))]
        for m, (prefix, words) in enumerate(splits if one else splits[:1], 1):
            traces += line_with_errors(run, f"{prefix}/reward", f"{label}{words}", n + m if one else n)
    return Figure(
        title="Reward",
        note="Held-out points carry 95% intervals (standard errors clustered by instance).",
        traces=traces,
        layout={"yaxis": {"title": {"text": "reward"}, "rangemode": "tozero"}, "height": 380},
        wide=True,
    )


def _entropy_and_acceptance(runs: Sequence[RunData]) -> Figure:
    """Two panels on one x axis: acceptance follows entropy unless the draft drifts."""
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
            "From the same tokens, on one axis. Acceptance that falls while entropy does not means that the "
            "draft no longer matches the target."
        )
        layout["yaxis2"]["domain"] = [0.56, 1]
        layout |= {"height": 460, "yaxis": {"domain": [0, 0.47], "title": {"text": "acceptance rate"}}}
    else:  # nothing was drafted
        for trace in traces:
            del trace["yaxis"]
        layout = {"yaxis": layout["yaxis2"]}
    return Figure(title=title, note=note, traces=traces, layout=layout, wide=True, section=section)


def _lines(chart: _Lines, runs: Sequence[RunData]) -> Figure:
    traces = []
    if len(runs) == 1:
        for n, (name, label) in enumerate(chart.metrics):
            if (points := runs[0].series(name))[0]:
                traces.append(line(points, label, n))
    else:
        for n, run in enumerate(runs):
            if (points := run.series(chart.metrics[0][0]))[0]:
                traces.append(line(points, run.name, n))
    axis: dict[str, Any] = {"title": {"text": chart.unit}}
    if chart.zero:
        axis["rangemode"] = "tozero"
    title = (
        chart.title if len(runs) == 1 or len(chart.metrics) == 1 else f"{chart.title}: {chart.metrics[0][1]}"
    )
    return Figure(title=title, note=chart.note, traces=traces, layout={"yaxis": axis}, section=chart.section)


def _timing(runs: Sequence[RunData]) -> Figure:
    if len(runs) > 1:
        return _timing_of_runs(runs)
    run = runs[0]
    whole = dict(zip(*run.series("timing_s/step"), strict=True))
    steps = sorted(whole)
    rest = dict(whole)
    traces = []
    for n, (name, label) in enumerate(STEP_PHASES):
        phase = dict(zip(*run.series(name), strict=True))
        if not steps or sum(phase.values()) < SMALL * sum(whole.values()):
            continue
        rest = {s: rest[s] - phase.get(s, 0.0) for s in steps}
        traces.append(_area((steps, [phase.get(s, 0.0) for s in steps]), label, n))
    if traces:
        traces.append(_area((steps, [max(0.0, rest[s]) for s in steps]), "other", COLOURS - 1))
    if (gen := run.series("timing_s/gen"))[0]:
        traces.append(line(gen, "one group's generation", 2, line={"color": "$text", "dash": "dot"}))
    return Figure(
        title="Where a step's time goes",
        note="The trainer's phases add up to the step; generation (dotted) runs beside them if asynchronous.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}, "height": 320},
        section=SPEED,
    )


def _area(points: tuple[list[int], list[float]], name: str, colour: int) -> dict[str, Any]:
    slot = f"${colour % COLOURS}"
    return line(points, name, colour, stackgroup="step", line={"width": 0.5}, fillcolor=slot)


def _timing_of_runs(runs: Sequence[RunData]) -> Figure:
    means = [{n: _mean(run.series(n)[1]) for n, _ in (("timing_s/step", ""), *STEP_PHASES)} for run in runs]
    labels = [run.name for run in runs]
    drawn = [
        (n, p) for n, p in enumerate(STEP_PHASES) if any(m[p[0]] > SMALL * m["timing_s/step"] for m in means)
    ]
    traces = [_bar(labels, [m[name] for m in means], label, n) for n, (name, label) in drawn]
    if traces:
        rest = [max(0.0, m["timing_s/step"] - sum(m[name] for _, (name, _) in drawn)) for m in means]
        traces.append(_bar(labels, rest, "other", COLOURS - 1))
    return Figure(
        title="Where a step's time goes",
        note="Mean seconds of a step, by phase of the trainer.",
        traces=traces,
        layout={
            "barmode": "stack",
            "hovermode": "closest",
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"autorange": "reversed", "automargin": True},
        },
        section=SPEED,
    )


def _bar(labels: list[str], values: list[float], name: str, colour: int) -> dict[str, Any]:
    x = [short(v) for v in values]
    marker = {"color": f"${colour % COLOURS}"}
    return {"type": "bar", "orientation": "h", "name": name, "y": labels, "x": x, "marker": marker}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
