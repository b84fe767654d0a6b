"""The plots of an adaptation: acceptance on its held-out sets, and what teacher forcing predicts of it.

Owns these figures. One run: a colour per held-out set, a dash per verification rule. Several: a colour per
run, a dash per held-out set under the first rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import ACCEPTANCE, DASHES, Figure, line, line_with_errors

LENGTH = re.compile(r"adapt/(?P<domain>.+)/(?P<mode>[^/]+)/acceptance_length")


def held_out(run: RunData) -> dict[str, list[str]]:
    """Verification rules by held-out set, of a run that adapted a draft."""
    found: dict[str, list[str]] = {}
    for match in filter(None, map(LENGTH.fullmatch, run.names())):
        found.setdefault(match["domain"], []).append(match["mode"])
    return found


def adaptation_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Those that have data."""
    return [figure for figure in (_acceptance(runs), _prediction(runs)) if figure.traces]


def _acceptance(runs: Sequence[RunData]) -> Figure:
    traces, one = [], len(runs) == 1
    for n, run in enumerate(runs):
        for m, (domain, modes) in enumerate(held_out(run).items()):
            for k, mode in enumerate(modes if one else modes[:1]):
                name = f"adapt/{domain}/{mode}/acceptance_length"
                label = f"{domain}, {mode}" if one else f"{run.name}: {domain}, {mode}"
                colour, dash = (m, k) if one else (n, m)
                style = {"dash": DASHES[dash % len(DASHES)]}
                traces += line_with_errors(run, name, label, colour=colour, line=style)
    return Figure(
        title="Acceptance on held-out sets",
        note="Tokens per verify step in real generation, bonus included, by step of the adaptation, with 95% "
        "intervals (standard errors clustered by prompt).",
        traces=traces,
        layout={"yaxis": {"title": {"text": "tokens"}}, "height": 380},
        wide=True,
        section=ACCEPTANCE,
    )


def _prediction(runs: Sequence[RunData]) -> Figure:
    """Teacher-forced prediction beside what was seen of the same sequences, under rejection."""
    traces = []
    for n, run in enumerate(runs):
        for m, domain in enumerate(held_out(run)):
            label, colour = (domain, m) if len(runs) == 1 else (f"{run.name}: {domain}", n)
            for name, words, dash in (
                (f"adapt/{domain}/predicted_tokens_per_step", "predicted", "dot"),
                (f"adapt/{domain}/rejection/tokens_per_step", "seen", "solid"),
            ):
                if (points := run.series(name))[0]:
                    style = {"mode": "lines+markers", "line": {"dash": dash}}
                    traces.append(line(points, f"{label}, {words}", colour, **style))
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
