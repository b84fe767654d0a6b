"""The plots of acceptance by turn, kind of token, entropy and position (Bebop Fig. 12b).

Owns these figures and their sample of rollouts; `diagnosis.breakdown` computes the rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.runs import RunData
from rlpipe.report.drawing import ACCEPTANCE, Figure, bars

MAX_FILES = 80  # maximum number of rollout files to read, spread evenly over the run
MAX_BINS = 16
CUTS = (
    ("kind", "by kind of token", "Commands and code are easier to foresee than prose.", "kind of token"),
    ("entropy", "by entropy of the target", "Where the target itself is undecided, drafts fail.", "nat"),
    ("turn", "by turn", "Of the trajectory, the first one is 0.", "turn"),
    ("position", "by position", "Sampled tokens before it in the trajectory.", "position (tokens)"),
)


def breakdown_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Draw a figure per breakdown with more than one bin; [] for runs without recorded draft tokens."""
    from rlpipe.diagnosis.breakdown import acceptance_by, verified_drafts

    drafts = {run.name: verified_drafts(run, _sample(run)) for run in runs}

    figures = []
    for key, title, note, axis in CUTS:
        traces = []
        for n, run in enumerate(runs):
            cuts = [cut for cut in acceptance_by(drafts[run.name], key) if cut.label][:MAX_BINS]
            if len(cuts) > 1:
                # Skip a breakdown with a single bin, which would only repeat the overall rate.
                hover = [f"{cut.verified} drafts, entropy {cut.entropy:.2f}" for cut in cuts]

                labels, rates = [cut.label for cut in cuts], [cut.rate for cut in cuts]
                errors = [cut.se or 0.0 for cut in cuts]
                traces.append(
                    bars(run.name, n, labels, values=rates, errors=errors, text=hover, textposition="none")
                )
        figures.append(
            Figure(
                title=f"Acceptance {title}",
                note=f"Σ accepted / Σ verified drafts of recorded rollouts, ± standard error. {note}",
                traces=traces,
                layout={
                    "hovermode": "closest",
                    "xaxis": {"title": {"text": axis}, "type": "category"},
                    "yaxis": {"title": {"text": "share kept"}, "range": [0, 1.02]},
                },
                section=ACCEPTANCE,
            )
        )

    return [figure for figure in figures if figure.traces]


def _sample(run: RunData) -> Iterator[dict[str, Any]]:
    files = sorted((run.path / "rollouts").glob("step_*.jsonl"))
    for file in files[:: max(1, ceil(len(files) / MAX_FILES))]:
        yield from read_jsonl(file)[0]
