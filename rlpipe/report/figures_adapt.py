"""The plots of an adaptation: acceptance on its held-out sets, and its prediction by teacher forcing.

Owns these figures. One run has a colour per held-out set and a dash style per verification rule. Several runs
have a colour per run and a dash style per held-out set, and only the first rule is plotted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import ACCEPTANCE, DASHES, Figure, line, line_with_errors

MEASURED = re.compile(r"adapt/(?P<domain>[^/]+)/(?P<mode>[^/]+)/(acceptance_length|expected/tokens_per_step)")


def held_out(run: RunData) -> dict[str, list[str]]:
    """Return the verification rules by held-out set; {} unless the run adapted a draft model."""
    rules: dict[str, list[str]] = {}
    for match in filter(None, map(MEASURED.fullmatch, run.names())):
        modes = rules.setdefault(match["domain"], [])
        if match["mode"] not in modes:
            modes.append(match["mode"])
    return rules


def adaptation_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Return the plots of an adaptation that have data."""
    return [figure for figure in (_acceptance(runs), _prediction(runs)) if figure.traces]


def _acceptance(runs: Sequence[RunData]) -> Figure:
    """Plot acceptance of each held-out set over the steps of adaptation."""
    traces, one = [], len(runs) == 1
    for n, run in enumerate(runs):
        for m, (domain, modes) in enumerate(held_out(run).items()):
            for k, mode in enumerate(modes if one else modes[:1]):
                prefix = f"adapt/{domain}/{mode}"
                label = f"{domain}, {mode}" if one else f"{run.name}: {domain}, {mode}"
                colour, dash = (m, k) if one else (n, m)
                style = {"dash": DASHES[dash % len(DASHES)]}
                expected = line_with_errors(
                    run, f"{prefix}/expected/tokens_per_step", label, colour=colour, line=style
                )

                # If the expected acceptance was computed, draw its line, and the observed value as a point.
                traces += expected or line_with_errors(
                    run, f"{prefix}/acceptance_length", label, colour=colour, line=style
                )
                seen = run.series(f"{prefix}/tokens_per_step")
                if expected and seen[0]:
                    marker = {"size": 10, "symbol": "diamond-open"}
                    traces.append(line(seen, f"{label}, generated", colour, mode="markers", marker=marker))

    return Figure(
        title="Acceptance on held-out sets",
        note="Tokens per verify step, bonus included, by step of the adaptation, with 95% intervals "
        "(standard errors clustered by prompt): expected on the model's own rollouts, diamonds in "
        "generation after the last step; without expectations, the lines are of generation.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "tokens"}}, "height": 380},
        wide=True,
        section=ACCEPTANCE,
    )


def _prediction(runs: Sequence[RunData]) -> Figure:
    """Plot predicted (teacher-forced) and observed acceptance under rejection, on the same sequences."""
    traces = []
    for n, run in enumerate(runs):
        for m, domain in enumerate(held_out(run)):
            label, colour = (domain, m) if len(runs) == 1 else (f"{run.name}: {domain}", n)
            for name, what, dash in (
                (f"adapt/{domain}/predicted_tokens_per_step", "predicted", "dot"),
                (f"adapt/{domain}/rejection/tokens_per_step", "seen", "solid"),
            ):
                if (points := run.series(name))[0]:
                    style = {"mode": "lines+markers", "line": {"dash": dash}}
                    traces.append(line(points, f"{label}, {what}", colour, **style))

    # Without a prediction to compare with, omit the figure.
    if not any(trace["name"].endswith("predicted") for trace in traces):
        traces = []

    return Figure(
        title="Predicted and seen",
        note="Tokens per verify step within turns: what the trainer's overlap of draft and target predicts "
        "(visit recursion), and what the engine did on the same sequences. A gap means they disagree.",
        traces=traces,
        layout={"yaxis": {"title": {"text": "tokens"}}},
        section=ACCEPTANCE,
    )
