"""The report: one self-contained HTML page about one run, or comparing several.

Owns what is said about runs: the summary, the tables, which trajectories are shown; the plots are in
figures.py, the look in report_page.py. Flow: directories -> RunData -> cards, figures, tables -> page.
A run without steps gets a page too: it says what is missing and shows the events.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from rlpipe.metrics.console import duration
from rlpipe.metrics.figures import Figure, figures, window
from rlpipe.metrics.names import Level, declared
from rlpipe.metrics.report_page import PAGE, SCRIPT, STYLE
from rlpipe.metrics.runs import RunData, dump, load_run

MAX_TRAJECTORY_BYTES = 600_000  # of text in the page, all runs together
MAX_TURN_CHARS = 6_000
MAX_EVENTS = 300
WINDOW = 10  # steps that "at the end" refers to
OUTCOMES = {
    "done": ("finished", "good"),
    "stopped": ("stopped", "warn"),
    "interrupted": ("interrupted", "warn"),
    "failed": ("failed", "bad"),
    "no end": ("killed, or still running", "warn"),
}
LEVELS = {"info": ("·", ""), "warning": ("! warning", "warn"), "fault": ("✗ fault", "bad")}


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the page about the runs in `run_dirs` to `out`, replacing it in one move.

    Raises ValueError when a directory is not a run directory, or none is given.
    """
    if not run_dirs:
        raise ValueError("no run directory given. Name at least one: python -m rlpipe.report RUN [RUN...]")
    runs = [load_run(path) for path in run_dirs]
    _make_names_unique(runs)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(_page(runs), encoding="utf-8")
    part.replace(out)


def _page(runs: Sequence[RunData]) -> str:
    from plotly.offline import get_plotlyjs

    drawn = figures(runs)
    trajectories = _trajectories(runs)
    body = [
        _head(runs),
        *(_notices(run) for run in runs),
        _cards(runs[0]) if len(runs) == 1 else _comparison(runs),
        _plots(drawn, window(runs)),
        _viewer(trajectories),
        "<h2>Details</h2>",
        *(_events(run, len(runs) > 1) for run in runs),
        _all_metrics(runs),
        *(_settings(run, len(runs) > 1) for run in runs),
        f"<footer>Written {time.strftime('%Y-%m-%d %H:%M')} by rlpipe. Opens offline.</footer>",
    ]
    shown = [{"traces": f.traces, "layout": f.layout} for f in drawn]
    return PAGE.substitute(
        title=escape(" · ".join(run.name for run in runs)),
        style=STYLE,
        body="\n".join(part for part in body if part),
        plotly=get_plotlyjs() if drawn else "",
        data=dump({"figures": shown, "trajectories": trajectories}),
        script=SCRIPT,
    )


# --- summary ---------------------------------------------------------------------------------------


def _head(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f'<h1>{len(runs)} runs compared</h1><p class="sub">A colour is a run, everywhere below.</p>'
    run = runs[0]
    facts = [
        run.settings.get("recipe"),
        (run.settings.get("model") or {}).get("path"),
        _speculation(run),
        str(run.path.resolve()),
    ]
    line = " · ".join(escape(str(fact)) for fact in facts if fact)
    return f'<h1>{escape(run.name)}</h1> {_badge(run)}<p class="sub">{line}</p>'


def _badge(run: RunData) -> str:
    words, colour = OUTCOMES.get(run.outcome, (run.outcome, "warn"))
    return f'<span class="badge {colour}">{escape(words)}</span>'


def _speculation(run: RunData) -> str:
    spec = run.settings.get("spec")
    if not isinstance(spec, dict) or not spec.get("mode"):
        return ""
    mode = str(spec["mode"]).lower()
    return "no speculation" if mode == "none" else f"MTP draft: {mode}, gamma {spec.get('gamma', '?')}"


def _notices(run: RunData) -> str:
    notes = []
    if not any("timing_s/step" in record for record in run.records):
        what = "Validation was recorded, but no" if run.records else "No"
        notes.append(
            f"<b>{what} training step of {escape(run.name)} was recorded.</b> The run ended before its first "
            "step did, or is still in it. The events below say how far it came; the terminal output has the "
            "error. With checkpoints in the run directory, the same command continues the run."
        )
    elif run.outcome in ("failed", "no end"):
        planned = f" of {run.planned_steps}" if run.planned_steps else ""
        how = "failed" if run.outcome == "failed" else "has not ended, or was killed"
        notes.append(
            f"<b>{escape(run.name)} {how}</b>: the last recorded step is "
            f"{run.steps}{planned}. The same command continues from its newest checkpoint."
        )
    if run.broken_lines:
        notes.append(
            f"{run.broken_lines} unreadable line(s) in the files of {escape(run.name)} were left out."
        )
    return "".join(f'<div class="notice">{note}</div>' for note in notes)


def _summary(run: RunData) -> list[tuple[str, str, str]]:
    """(label, big text as HTML, small text) of everything worth a card."""
    cards = [_validation_card(run, "val", "Validation reward")]
    splits = sorted({n.split("/")[1] for n in run.names() if n.startswith("val/") and n.count("/") == 2})
    for split in splits:
        if run.series(f"val/{split}/reward") != run.series("val/reward"):
            cards.append(_validation_card(run, f"val/{split}", f"Validation: {split.replace('_', ' ')}"))
    cards += [
        _gauge_card(run, "spec/acceptance_length", "Acceptance length", ".2f", "tokens a verify step"),
        _gauge_card(run, "perf/tokens_per_s/rollout", "Rollout tokens / s", ",.0f", "of a busy engine"),
    ]
    step_seconds = run.series("timing_s/step")[1]
    done = f"{run.steps}" + (
        f' <span class="from">of {run.planned_steps}</span>' if run.planned_steps else ""
    )
    pace = f"{median(step_seconds):.1f} s a step (median)" if step_seconds else "no step was timed"
    cards.append(("Training steps", done, pace))
    cards.append(("Duration", duration(run.seconds), "wall-clock"))
    masked, retries = (round(sum(run.series(f"env/{name}")[1])) for name in ("masked", "retries"))
    small = f"warnings {run.count(Level.WARNING)} · masked {masked} · retries {retries}"
    cards.append(("Faults", str(run.count(Level.FAULT)), small))
    return [card for card in cards if card is not None]


def _validation_card(run: RunData, prefix: str, label: str) -> tuple[str, str, str] | None:
    steps, values = run.series(f"{prefix}/reward")
    if not values:
        return None
    errors = dict(zip(*run.series(f"{prefix}/reward_se"), strict=True))
    ends = [(steps[0], values[0]), (steps[-1], values[-1])] if len(values) > 1 else [(steps[0], values[0])]
    *before, (_, last) = ends
    big = "".join(f'<span class="from">{v:.3f} → </span>' for _, v in before) + f"{last:.3f}"
    small = " → ".join(f"±{errors[s]:.3f}" for s, _ in ends if s in errors)
    change = f"{values[-1] - values[0]:+.3f}; " if before else ""
    return label, big, f"{change}{small} (SE)" if small else change.rstrip("; ")


def _gauge_card(run: RunData, name: str, label: str, spec: str, words: str) -> tuple[str, str, str] | None:
    values = run.series(name)[1]
    if not values:
        return None
    first, last = median(values[:WINDOW]), median(values[-WINDOW:])
    big = (
        f'<span class="from">{first:{spec}} → </span>{last:{spec}}'
        if len(values) > WINDOW
        else f"{last:{spec}}"
    )
    return label, big, words


def _cards(run: RunData) -> str:
    cards = "".join(
        f'<div class="card"><div class="label">{escape(label)}</div><div class="big">{big}</div>'
        f'<div class="small">{escape(small)}</div></div>'
        for label, big, small in _summary(run)
    )
    return f'<div class="cards">{cards}</div>'


def _comparison(runs: Sequence[RunData]) -> str:
    summaries = [{label: (big, small) for label, big, small in _summary(run)} for run in runs]
    labels = list(dict.fromkeys(label for summary in summaries for label in summary))
    smalls = {label: {s[label][1] for s in summaries if label in s} for label in labels}
    shared = {label: next(iter(texts)) for label, texts in smalls.items() if len(texts) == 1}
    titles = [f'{label}<br><span class="small">{escape(shared.get(label, ""))}</span>' for label in labels]
    rows = []
    for n, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        name = f'<span class="swatch" data-n="{n}"></span><b>{escape(run.name)}</b><br>{_badge(run)}'
        cells = [summary.get(label, ("–", "")) for label in labels]
        own = [
            "" if label in shared else escape(small) for label, (_, small) in zip(labels, cells, strict=True)
        ]
        rows.append(
            [
                name,
                *(f'{big}<br><span class="small">{s}</span>' for (big, _), s in zip(cells, own, strict=True)),
            ]
        )
    return f'<div class="runs">{_table(["run", *titles], rows)}</div>'


def _plots(drawn: Sequence[Figure], steps: int) -> str:
    boxes = "".join(
        f'<section class="plot{" wide" if f.wide else ""}"><h3>{escape(f.title)}</h3>'
        f'<p class="note">{escape(f.note)}</p><div id="plot-{n}"></div></section>'
        for n, f in enumerate(drawn)
    )
    note = f'<p class="note">A point stands for {steps} steps (their mean).</p>' if steps > 1 else ""
    return f'<h2>Curves</h2>{note}<div class="plots">{boxes}</div>' if drawn else ""


# --- tables ----------------------------------------------------------------------------------------


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table whose titles and cells are HTML already; `numeric` columns are aligned to the right."""
    kind = [' class="num"' if n in numeric else "" for n in range(len(titles))]
    head = "".join(f"<th{k}>{t}</th>" for k, t in zip(kind, titles, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _events(run: RunData, several: bool) -> str:
    if not run.events:
        return ""
    weight = {"fault": 2, "warning": 1}
    kept = sorted(run.events, key=lambda e: (weight.get(e.get("level"), 0), e.get("time", 0)))[-MAX_EVENTS:]
    kept.sort(key=lambda e: e.get("time", 0))
    start = run.events[0].get("time", 0)
    rows = []
    for event in kept:
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
    left_out = (
        f", {len(run.events) - len(kept)} of lesser weight left out" if len(kept) < len(run.events) else ""
    )
    title = f"Events{f' of {run.name}' if several else ''} ({len(run.events)}{left_out})"
    is_open = " open" if not any("timing_s/step" in r for r in run.records) else ""
    table = _table(["after", "", "event", "fields"], rows, numeric=(0,))
    return f"<details{is_open}><summary>{escape(title)}</summary>{table}</details>"


def _all_metrics(runs: Sequence[RunData]) -> str:
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
    table = _table(titles, rows, numeric=range(1, 1 + len(columns)))
    return f"<details><summary>All metrics ({len(rows)})</summary>{table}</details>"


def _meaning(name: str) -> tuple[str, str]:
    try:
        metric = declared(name)
    except ValueError:  # written by another version, or by an extension that is not loaded here
        return "", "(not declared in this version)"
    return escape(metric.unit), escape(metric.definition)


def _settings(run: RunData, several: bool) -> str:
    if not run.config_text:
        return ""
    title = f"Settings{f' of {run.name}' if several else ''}"
    return f"<details><summary>{escape(title)}</summary><pre>{escape(run.config_text)}</pre></details>"


# --- trajectories ----------------------------------------------------------------------------------


def _trajectories(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Trajectories spread evenly over each run, as many as fit into MAX_TRAJECTORY_BYTES."""
    shown = []
    for run in runs:
        rows = [_row(t, run.name if len(runs) > 1 else "") for t in run.trajectories if t.get("turns")]
        budget, size = MAX_TRAJECTORY_BYTES / len(runs), sum(_size(row) for row in rows)
        stride = max(1.0, size / budget)
        shown += [rows[int(n * stride)] for n in range(int(len(rows) / stride))]
    return shown


def _row(trajectory: dict[str, Any], run: str) -> dict[str, Any]:
    step = trajectory.get("step")
    turns = [
        {"role": role, "text": _cut(text)}
        for turn in trajectory["turns"]
        if isinstance(turn, dict)
        for role, text in _said(turn)
    ]
    reward = trajectory.get("reward")
    return {
        "group": f"{run}: step {step}" if run else f"step {step}",
        "step": step,
        "instance_id": str(trajectory.get("instance_id", "")),
        "reward": reward if isinstance(reward, (int, float)) else None,
        "turns": turns,
    }


def _said(turn: dict[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of a turn, recorded as {role, text} or as the pair {action, observation}."""
    if "action" in turn:
        said = [("assistant", str(turn["action"])), ("tool", str(turn.get("observation", "")))]
        return said if said[1][1] else said[:1]
    return [(str(turn.get("role", "")), str(turn.get("text", "")))]


def _cut(text: str) -> str:
    gone = len(text) - MAX_TURN_CHARS
    return text if gone <= 0 else f"{text[:MAX_TURN_CHARS]}\n… {gone} characters left out"


def _size(row: dict[str, Any]) -> int:
    return 120 + sum(40 + len(turn["text"].encode()) for turn in row["turns"])


def _viewer(trajectories: Sequence[dict[str, Any]]) -> str:
    if not trajectories:
        return ""
    groups = list(dict.fromkeys(t["group"] for t in trajectories))
    options = "".join(f'<option value="{escape(g)}">{escape(g)}</option>' for g in groups)
    return (
        f'<h2>Trajectories</h2><div class="viewer" id="viewer"><div class="bar">'
        f'<select id="v-step" aria-label="step"><option value="">all steps</option>{options}</select>'
        '<select id="v-outcome" aria-label="outcome"><option value="">any reward</option>'
        '<option value="solved">reward 1 or more</option><option value="not">less</option></select>'
        '<span class="grow"></span><button id="v-prev">← previous</button>'
        '<button id="v-next">next →</button></div><div class="note" id="v-where"></div>'
        '<div id="v-turns"></div></div>'
    )


def _make_names_unique(runs: Sequence[RunData]) -> None:
    """Runs of one name get their parent directory in front, and a number if that does not help."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"
    seen: dict[str, int] = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"
