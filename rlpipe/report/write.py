"""The report: one self-contained HTML page that describes one run or compares several.

Owns the summary and the tables; the plots are in figures.py, the trajectories in viewer.py, and the layout in
page.html, page.css and page.js. Flow: directories -> RunData -> cards, figures, tables -> page. Everything is
inline, the large parts (plotly, trajectories) are gzipped, and the content security policy forbids every
request, so the file can be mailed, archived and opened offline. In a live page, live.js may poll the server
that delivered the page. A run without steps also gets a page, with its events and a notice.
"""

from __future__ import annotations

import base64
import gzip
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from rlpipe.config.drafters import Drafter
from rlpipe.diagnosis.held_out import PRIMARY, primary_split, reward_intervals, splits
from rlpipe.diagnosis.seeds import name_by_settings, pool_seeds
from rlpipe.metrics.console import duration
from rlpipe.metrics.names import Level
from rlpipe.metrics.runs import RunData, dump, load_run
from rlpipe.report.details import all_metrics, arms, differences, events, samples, settings, table
from rlpipe.report.drawing import SECTIONS, Figure
from rlpipe.report.figures import figures, window
from rlpipe.report.figures_adapt import held_out
from rlpipe.report.pays import pays_table
from rlpipe.report.viewer import shown_trajectories, viewer_html

WINDOW = 10  # number of steps that count as the start or the end of a run in a card
OUTCOMES = {
    "done": ("finished", "good"),
    "stopped": ("stopped", "warn"),
    "interrupted": ("interrupted", "warn"),
    "failed": ("failed", "bad"),
    "no end": ("killed, or still running", "warn"),
}


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the page about the runs in `run_dirs` to `out`, replacing it atomically.

    Raises ValueError if `run_dirs` is empty or one of them is not a run directory.
    """
    if not run_dirs:
        raise ValueError("no run directory given. Name at least one: rlpipe report RUN [RUN...]")

    runs = load_runs(run_dirs)
    content = make_content(runs)

    # Replace the file atomically, so that no reader sees an incomplete page.
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(page(content), encoding="utf-8")
    part.replace(out)


@dataclass(slots=True, kw_only=True)
class Content:
    """The content of a page. body: HTML. figures, trajectories: data for the page's scripts."""

    title: str
    body: str
    figures: list[Figure]
    trajectories: list[dict[str, Any]]

    def data(self) -> dict[str, Any]:
        """Return the data from which the page's script draws the plots."""
        return {"figures": [{"traces": f.traces, "layout": f.layout} for f in self.figures]}


def load_runs(run_dirs: Sequence[Path]) -> list[RunData]:
    """Read run directories; name the runs of a sweep by their settings, and make every name unique."""
    runs = [load_run(path) for path in run_dirs]
    name_by_settings(runs)
    _make_names_unique(runs)
    return runs


def make_content(runs: Sequence[RunData]) -> Content:
    """Build the body, the figures and the trajectories of the page about the runs."""
    from rlpipe.diagnosis.comparison import compare_runs  # needs numpy, which nothing above needs
    from rlpipe.diagnosis.summary import summarize

    shown, trajectories = figures(runs), shown_trajectories(runs)

    body = [
        _head(runs),
        navigation(shown, trajectories=bool(trajectories)),
        *(_notices(run) for run in runs),
        (summarize(runs[0]) if len(runs) == 1 else compare_runs(runs)).html(),
        _cards(runs[0]) if len(runs) == 1 else _comparison(runs),
        pays_table(runs[0]) if len(runs) == 1 else "",
        *([differences(runs)] if len(runs) > 1 else []),
        _plots(shown, window(runs)),
        samples(runs[0]) if len(runs) == 1 else "",
        viewer_html(trajectories),
        '<h2 id="details">Details</h2>',
        *(events(run, several=len(runs) > 1) for run in runs),
        all_metrics(runs),
        *(settings(run, several=len(runs) > 1) for run in runs),
        f"<footer>Written {time.strftime('%Y-%m-%d %H:%M')} by rlpipe. Opens offline.</footer>",
    ]

    return Content(
        title=" · ".join(run.name for run in runs),
        body="\n".join(part for part in body if part),
        figures=shown,
        trajectories=trajectories,
    )


def page(content: Content, *, live: bool = False) -> str:
    """Return the page as HTML. live: the page polls its server for changes; otherwise it sends no request."""
    from plotly.offline import get_plotlyjs

    return Template(_file("page.html")).substitute(
        title=escape(content.title),
        policy="connect-src 'self'; " if live else "",
        style=_file("page.css"),
        body=content.body,
        plotly=pack(get_plotlyjs()) if content.figures or live else "",
        data=dump(content.data()),
        trajectories=pack(dump(content.trajectories)) if content.trajectories else "",
        script=_file("page.js") + (_file("live.js") if live else ""),
    )


def _file(name: str) -> str:
    """Read a file with the page's markup, style or script."""
    return Path(__file__).with_name(name).read_text("utf-8")


def pack(text: str) -> str:
    """Compress text with gzip and encode it in base64, as the page's `unpack` expects."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=7, mtime=0)).decode()


# --- summary ---------------------------------------------------------------------------------------


def _head(runs: Sequence[RunData]) -> str:
    """Return the title of the page."""
    if len(runs) > 1:
        legend = "A colour is a run, everywhere below."
        if len(pool_seeds(runs)) < len(runs):
            legend = "Runs that differ in run.seed only are one arm. A colour is an arm, everywhere below."
        return f'<h1 id="top">{len(runs)} runs compared</h1><p class="sub">{legend}</p>'

    run = runs[0]
    metadata = [
        run.settings.get("recipe"),
        (run.settings.get("model") or {}).get("path"),
        _speculation(run),
        str(run.path.resolve()),
    ]
    line = " · ".join(escape(str(item)) for item in metadata if item)
    return f'<h1 id="top">{escape(run.name)}</h1> {_badge(run)}<p class="sub">{line}</p>'


def _badge(run: RunData) -> str:
    text, colour = OUTCOMES.get(run.outcome, (run.outcome, "warn"))
    return f'<span class="badge {colour}">{escape(text)}</span>'


def _speculation(run: RunData) -> str:
    spec = run.settings.get("spec")
    if not isinstance(spec, dict) or not spec.get("mode"):
        return ""

    mode = str(spec["mode"]).lower()
    drafter = Drafter(str(spec.get("drafter", "mtp"))).kind.title
    return "no speculation" if mode == "none" else f"{drafter}: {mode}, gamma {spec.get('gamma', '?')}"


def _notices(run: RunData) -> str:
    """Return notices about a run that failed, did not end or has few records."""
    notes = []
    if not any("timing_s/step" in record for record in run.records):
        what = "Validation was recorded, but no" if run.records else "No"
        notes.append(
            f"<b>{what} training step of {escape(run.name)} was recorded.</b> The run ended before its first "
            "step did, or is still in it. The events below show how far it came; the terminal output has the "
            "error. With checkpoints in the run directory, the same command continues the run."
        )
    elif run.outcome in ("failed", "no end"):
        planned = f" of {run.planned_steps}" if run.planned_steps else ""
        how = "failed" if run.outcome == "failed" else "has not ended, or was killed"
        notes.append(
            f"<b>{escape(run.name)} {how}</b>: the last recorded step is "
            f"{run.steps}{planned}. The same command continues from its newest checkpoint."
        )

    # An alarm may be raised many times: list it once, with its first steps.
    steps_by_alarm: dict[str, list[Any]] = {}
    for event in run.events:
        if event.get("kind") == "alarm":
            steps_by_alarm.setdefault(str(event.get("alarm")), []).append(event.get("step"))
    if steps_by_alarm:
        names = "; ".join(
            f"<b>{escape(name)}</b> at step {', '.join(escape(str(s)) for s in steps[:4])}"
            + (f" and {len(steps) - 4} more" if len(steps) > 4 else "")
            for name, steps in steps_by_alarm.items()
        )
        notes.append(f"Alarms of {escape(run.name)}: {names}. What to do is in docs/alarms.md.")

    if run.broken_lines:
        notes.append(
            f"{run.broken_lines} unreadable line(s) in the files of {escape(run.name)} were left out."
        )

    return "".join(f'<div class="notice">{note}</div>' for note in notes)


def _summary(run: RunData) -> list[tuple[str, str, str]]:
    """Return (label, large text as HTML, small text) of every card."""
    primary = primary_split(run).replace("_", " ")
    rewards = {PRIMARY: f"Validation: {primary}" if primary else "Validation reward"}
    for split in splits(run):
        rewards[f"val/{split}/reward"] = f"Validation: {split.replace('_', ' ')}"

    # Acceptance lengths have standard errors.
    measured = {}
    for domain, (mode, *_) in held_out(run).items():
        held_out_set = f"{domain.replace('_', ' ')}, {mode.replace('_', ' ')}"
        expected = f"adapt/{domain}/{mode}/expected/tokens_per_step"
        length = f"adapt/{domain}/{mode}/acceptance_length"
        name = expected if run.series(expected)[0] else length
        measured[name] = f"Acceptance length: {held_out_set}"
    cards = [_measured_card(run, name, label) for name, label in measured.items()]
    cards = [*(_reward_card(run, name, label) for name, label in rewards.items()), *cards]

    cards += [
        _gauge_card(
            run, "spec/acceptance_length", "Acceptance length", spec=".2f", unit="tokens a verify step"
        ),
        _gauge_card(
            run, "perf/tokens_per_s/rollout", "Rollout tokens / s", spec=",.0f", unit="of a busy engine"
        ),
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


def _reward_card(run: RunData, name: str, label: str) -> tuple[str, str, str] | None:
    """Return the card of a held-out reward: its first and last value, with the same intervals as the plot."""
    intervals = reward_intervals(run, name)
    if not intervals:
        return None

    last, before = intervals[-1], intervals[:-1][:1]
    big = "".join(f'<span class="from">{i.value:.3f} → </span>' for i in before) + f"{last.value:.3f}"
    ends = " → ".join(f"[{i.low:.3f}, {i.high:.3f}]" for i in (*before, last))
    change = [last - first for first in before]
    small = "".join(f"{c.value:+.3f} [{c.low:+.3f}, {c.high:+.3f}]; " for c in change)
    return label, big, f"{small}{ends}"


def _measured_card(run: RunData, name: str, label: str) -> tuple[str, str, str] | None:
    """Return the card of a metric that has a standard error, `name`_se: its first and last value."""
    steps, values = run.series(name)
    if not values:
        return None

    # With a single value, there is no change to display.
    errors = dict(zip(*run.series(f"{name}_se"), strict=True))
    ends = [(steps[0], values[0]), (steps[-1], values[-1])] if len(values) > 1 else [(steps[0], values[0])]

    *before, (_, last) = ends
    big = "".join(f'<span class="from">{v:.3f} → </span>' for _, v in before) + f"{last:.3f}"
    small = " → ".join(f"±{errors[s]:.3f}" for s, _ in ends if s in errors)
    change = f"{values[-1] - values[0]:+.3f}; " if before else ""
    return label, big, f"{change}{small} (SE)" if small else change.rstrip("; ")


def _gauge_card(run: RunData, name: str, label: str, *, spec: str, unit: str) -> tuple[str, str, str] | None:
    """Return the card of a gauge: medians of its first and last values. spec: format of the numbers."""
    values = run.series(name)[1]
    if not values:
        return None

    first, last = median(values[:WINDOW]), median(values[-WINDOW:])
    big = (
        f'<span class="from">{first:{spec}} → </span>{last:{spec}}'
        if len(values) > WINDOW
        else f"{last:{spec}}"
    )
    return label, big, unit


def _cards(run: RunData) -> str:
    cards = "".join(
        f'<div class="card"><div class="label">{escape(label)}</div><div class="big">{big}</div>'
        f'<div class="small">{escape(small)}</div></div>'
        for label, big, small in _summary(run)
    )
    return f'<div class="cards">{cards}</div>'


def _comparison(runs: Sequence[RunData]) -> str:
    """Return the table that compares runs, and the settings in which they differ."""
    # Runs with the same configuration have the same colour.
    colours = {id(run): n for n, arm in enumerate(pool_seeds(runs)) for run in arm.seeds or [arm]}
    summaries = [{label: (big, small) for label, big, small in _summary(run)} for run in runs]
    labels = list(dict.fromkeys(label for summary in summaries for label in summary))

    # If a small text is the same in every run, put it into the column's title.
    small_texts = {label: {s[label][1] for s in summaries if label in s} for label in labels}
    shared = {label: next(iter(texts)) for label, texts in small_texts.items() if len(texts) == 1}
    titles = [
        f'{escape(label)}<br><span class="small">{escape(shared.get(label, ""))}</span>' for label in labels
    ]

    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        swatch = f'<span class="swatch" data-n="{colours[id(run)]}"></span>'
        row = [f"{swatch}<b>{escape(run.name)}</b><br>{_badge(run)}"]
        for label in labels:
            big, small = summary.get(label, ("–", ""))
            row.append(f'{big}<br><span class="small">{"" if label in shared else escape(small)}</span>')
        rows.append(row)

    runs_table = f'<div class="runs">{table(["run", *titles], rows)}</div>'
    return arms(runs) + runs_table


def _plots(shown: Sequence[Figure], steps: int) -> str:
    """Return empty boxes for the plots of each section; the page's script fills them."""
    parts = []
    if steps > 1:
        parts.append(f'<p class="note">A point is the mean of {steps} steps.</p>')

    for section in SECTIONS:
        boxes = "".join(
            f'<section class="plot{" wide" if f.wide else ""}"><h3>{escape(f.title)}</h3>'
            f'<p class="note">{escape(f.note)}</p><div id="plot-{n}"></div></section>'
            for n, f in enumerate(shown)
            if f.section == section
        )
        if boxes:
            parts.append(f'<h2 id="{_anchor(section)}">{section}</h2><div class="plots">{boxes}</div>')
    return "\n".join(parts)


def navigation(shown: Sequence[Figure], *, trajectories: bool) -> str:
    """Build the links to the parts of the page. trajectories: whether the page has a viewer."""
    parts = [section for section in SECTIONS if any(f.section == section for f in shown)]
    parts += [*(["Trajectories"] if trajectories else []), "Details"]
    links = "".join(f'<a href="#{_anchor(part)}">{escape(part)}</a>' for part in ("Top", *parts))
    return f'<nav aria-label="parts of the page">{links}</nav>'


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _make_names_unique(runs: Sequence[RunData]) -> None:
    """Add the parent directory to names that occur twice; if they are still equal, append a number."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"

    # The parent directories may also be equal.
    seen: dict[str, int] = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"
