"""The tables of the report: events, all metrics, all settings, and the settings that differ between runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rlpipe.metrics.console import duration
from rlpipe.metrics.names import declared
from rlpipe.metrics.runs import RunData

MAX_EVENTS = 300
LEVELS = {"info": ("·", ""), "warning": ("! warning", "warn"), "fault": ("✗ fault", "bad")}


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Build an HTML table from column titles and rows; columns in `numeric` are right-aligned."""
    kind = [' class="num"' if n in numeric else "" for n in range(len(titles))]

    head = "".join(f"<th{k}>{t}</th>" for k, t in zip(kind, titles, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for row in rows
    )

    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def events(run: RunData, *, several: bool) -> str:
    """Build the list of a run's events. several: whether the page has more than one run."""
    if not run.events:
        return ""

    # If there are too many events, select faults first, then warnings. Display them in order of time.
    weight = {"fault": 2, "warning": 1}
    listed = sorted(run.events, key=lambda e: (weight.get(e.get("level", "info"), 0), e.get("time", 0)))[
        -MAX_EVENTS:
    ]
    listed.sort(key=lambda e: e.get("time", 0))

    start = run.events[0].get("time", 0)
    rows = []
    for event in listed:
        mark, colour = LEVELS.get(event.get("level", "info"), LEVELS["info"])
        fields = {k: v for k, v in event.items() if k not in ("time", "kind", "level")}
        text = " ".join(f"{k}={v}" for k, v in fields.items())
        rows.append(
            [
                escape(duration(event.get("time", start) - start)),
                f'<span class="{colour}">{mark}</span>',
                f"<code>{escape(str(event.get('kind')))}</code>",
                escape(text[:600]),
            ]
        )

    omitted = len(run.events) - len(listed)
    left_out = f", {omitted} of lesser weight left out" if omitted else ""
    title = f"Events{f' of {run.name}' if several else ''} ({len(run.events)}{left_out})"
    # A run without a step has failed early, so open its list of events.
    is_open = " open" if not any("timing_s/step" in r for r in run.records) else ""
    rows_html = table(["after", "", "event", "fields"], rows, numeric=(0,))
    return f"<details{is_open}><summary>{escape(title)}</summary>{rows_html}</details>"


def samples(run: RunData) -> str:
    """Build the table of the model's answers at the first and the last validation, by held-out set."""
    by_split: dict[str, list[dict[str, Any]]] = {}
    for event in run.events:
        if event.get("kind") == "sample":
            by_split.setdefault(str(event.get("split")), []).append(event)
    if not by_split:
        return ""

    rows = []
    for split, answers in by_split.items():
        first, last = answers[0], answers[-1]
        ends = [_sample(first), _sample(last) if last is not first else "–"]
        rows.append([escape(split.replace("_", " ")), escape(str(first.get("prompt", ""))), *ends])
    titles = ["set", "first prompt", "at the first validation", "at the last"]
    return f'<h2 id="samples">Samples</h2>{table(titles, rows)}'


def _sample(event: dict[str, Any]) -> str:
    """Return the answer of a `sample` event as HTML."""
    answer = escape(str(event.get("answer", ""))).replace("\n", "<br>")
    return (
        f'{answer}<br><span class="from">step {event.get("step")}, reward {event.get("reward", 0):.3g}</span>'
    )


def all_metrics(runs: Sequence[RunData]) -> str:
    """Build the table of all metrics: first and last value for one run, last values for several runs."""
    names = sorted({name for run in runs for name in run.names()})
    rows = []
    for name in names:
        values = [run.series(name)[1] for run in runs]
        ends = [v for vs in values for v in ((vs[:1], vs[-1:]) if len(runs) == 1 else (vs[-1:],))]
        rows.append(
            [f"<code>{escape(name)}</code>", *(f"{v[0]:.4g}" if v else "–" for v in ends), *_meaning(name)]
        )
    if not rows:
        return ""

    columns = ["first", "last"] if len(runs) == 1 else [f"{escape(run.name)}, last" for run in runs]
    titles = ["metric", *columns, "unit", "definition"]
    rows_html = table(titles, rows, numeric=range(1, 1 + len(columns)))
    return f"<details><summary>All metrics ({len(rows)})</summary>{rows_html}</details>"


def _meaning(name: str) -> tuple[str, str]:
    try:
        metric = declared(name)
    except ValueError:  # a metric of another version, or of an extension that is not loaded
        return "", "(not declared in this version)"
    return escape(metric.unit), escape(metric.definition)


def settings(run: RunData, *, several: bool) -> str:
    """Build the text of a run's settings. several: whether the page has more than one run."""
    if not run.config_text:
        return ""

    title = f"Settings{f' of {run.name}' if several else ''}"
    return f"<details><summary>{escape(title)}</summary><pre>{escape(run.config_text)}</pre></details>"


def arms(runs: Sequence[RunData]) -> str:
    """Build the table of configurations, with one row for all seeds of each; "" if none has several seeds."""
    from rlpipe.diagnosis.comparison import MEASURES, readings_of
    from rlpipe.diagnosis.seeds import pool_seeds

    pooled = pool_seeds(runs)
    if len(pooled) == len(runs):
        return ""

    by_measure = [{reading.arm: reading for reading in readings_of(m, pooled)} for m in MEASURES]
    rows = []
    for n, arm in enumerate(pooled):
        cells = [
            by_arm[arm.name].text(measure.spec) if arm.name in by_arm else "–"
            for measure, by_arm in zip(MEASURES, by_measure, strict=True)
        ]
        swatch = f'<span class="swatch" data-n="{n}"></span><b>{escape(arm.name)}</b>'
        rows.append([swatch, str(len(arm.seeds) or 1), *cells])

    titles = ["arm", "runs", *(measure.label for measure in MEASURES)]
    rows_html = table(titles, rows, numeric=range(1, len(titles)))
    return f'<h2 id="arms">Arms</h2>{rows_html}<h2>Runs</h2>'


def differences(runs: Sequence[RunData]) -> str:
    """Build the table of settings that differ between runs."""
    from rlpipe.diagnosis.seeds import differing

    rows = [
        [f"<code>{escape(name)}</code>", *map(escape, values)] for name, values in differing(runs).items()
    ]
    if not rows:
        return "<p>All settings are the same.</p>"

    return f"<h2>Settings that differ</h2>{table(['setting', *(escape(r.name) for r in runs)], rows)}"
