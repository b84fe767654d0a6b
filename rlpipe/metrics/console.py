"""The console sink: rows and a live panel for a person who watches a run.

Owns the terminal during a run. On a terminal: a header, one aligned row per step that stays in the
scrollback, and below it a live panel with trends, progress and the current phase. Elsewhere
(a file, a CI log): one plain ASCII line per step or event, no control codes. Reads committed records
and events; computes only trends and the time left. The library rich is imported when the sink opens.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.names import Level

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
TREND = 24  # steps in a trend
SPLIT_EVERY = 10  # steps between two lines that explain the change of acceptance
SPLIT = "acceptance_split"
SPLIT_PARTS = {"entropy": "entropy", "mismatch": "draft", "staleness": "staleness", "contexts": "contexts"}
TITLES_EVERY = 24  # rows after which the column titles are repeated
SHOWN_EVENTS = (
    "sample",
    "waiting",
    "acceptance",
    "checkpoint",
    "resumed",
)  # displayed events of level info; warnings and faults are always displayed
REWARD = "critic/rewards/mean"
SAMPLE_WIDTH = 100  # characters of a sample's prompt, and of its answer
MARKS = {Level.INFO: ("·", "dim"), Level.WARNING: ("!", "yellow"), Level.FAULT: ("✗", "bold red")}


@dataclass(slots=True, kw_only=True)
class Header:
    """The description of a run on the console.

    title: name of the run.
    details: (label, text) lines below the title.
    total_steps: number of steps of the run.
    baseline: first held-out rewards of a continued run by metric, measured by an earlier process.
    trains_draft: whether the run trains a draft model instead of the policy; this selects the columns.
    """

    title: str
    details: list[tuple[str, str]] = field(default_factory=list)
    total_steps: int
    baseline: dict[str, float] = field(default_factory=dict)
    trains_draft: bool = False


@dataclass(slots=True, frozen=True)
class _Column:
    """A column of the table. width: characters. style: rich style. cell: returns the text for a record."""

    title: str
    width: int
    style: str
    cell: Callable[[dict[str, Any]], str]


def _short(value: float, spec: str = ".3f") -> str:
    """Format a number; use an exponent if it would be too long otherwise."""
    return format(value, spec if abs(value) < 1e9 else ".3g")


def _number(name: str, spec: str) -> Callable[[dict[str, Any]], str]:
    def cell(record: dict[str, Any]) -> str:
        if name not in record:
            return ""
        return "nan" if record[name] is None else _short(record[name], spec)

    return cell


def _validation(record: dict[str, Any], under: str = "val") -> str:
    reward, error = record.get(f"{under}/reward"), record.get(f"{under}/reward_se")
    if reward is None:
        return ""
    return _short(reward) + ("" if error is None else f" ±{_short(error)}")


def _validated_sets(record: dict[str, Any]) -> list[str]:
    """Return the held-out sets of a record in the order of validation; [] if there is only one."""
    names = [name.split("/")[1] for name in record if re.fullmatch(r"val/[^/]+/reward", name)]
    return names if len(names) > 1 else []


def _split(record: dict[str, Any]) -> str:
    """Return the change of acceptance since the early phase, as a sum of its causes; "" if not recorded."""
    if (total := record.get(f"{SPLIT}/total")) is None:
        return ""

    parts = {label: record.get(f"{SPLIT}/{part}") for part, label in SPLIT_PARTS.items()}
    shown = {label: f"{label} {100 * part:+.1f}" for label, part in parts.items() if part is not None}

    # Without a late probe, the part of the draft includes every part that is not recorded.
    if "contexts" not in shown and (rest := parts["draft"]) is not None:
        together = " + ".join(label for label in parts if label == "draft" or label not in shown)
        shown["draft"] = f"{together} {100 * rest:+.1f} (not yet split by a probe)"

    summands = "".join(f", {text}" for text in shown.values())
    ends = [100 * (record.get(f"{SPLIT}/total/{end}") or 0.0) for end in ("low", "high")]
    return (
        f"acceptance since steps 1-{record[f'{SPLIT}/early_steps']:.0f}: {100 * total:+.1f} "
        f"[{ends[0]:+.1f}, {ends[1]:+.1f}] points{summands}"
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SAMPLE_WIDTH else line[: SAMPLE_WIDTH - 3] + "..."


def _sample_text(event: dict[str, Any]) -> str:
    prompt, answer = (_shortened(str(event.get(name, ""))) for name in ("prompt", "answer"))
    return f'{event.get("split")}: "{prompt}" → "{answer}"  reward {event.get("reward", 0.0):.3g}'


def _by_depth(record: dict[str, Any]) -> str:
    """Return the overlap of draft and target by depth, as .39/.35/.34."""
    rates: list[float] = []
    while (rate := record.get(f"mtp/alpha/depth_{len(rates) + 1}")) is not None:
        rates.append(rate)
    return "/".join(f"{rate:.2f}".removeprefix("0") for rate in rates)


COLUMNS = (
    _Column("reward", 7, "bold green", _number(REWARD, ".3f")),
    _Column("val", 13, "bold cyan", _validation),
    _Column("entropy", 8, "", _number("rollout/entropy", ".3f")),
    _Column("acc.len", 8, "magenta", _number("spec/acceptance_length", ".2f")),
    _Column("stale", 6, "", _number("training/off_policy/trajectory_staleness/mean", ".2f")),
    _Column("tokens/s", 9, "", _number("perf/tokens_per_s/rollout", ",.0f")),
    _Column("s/step", 7, "", _number("timing_s/step", ".1f")),
)
DRAFT_COLUMNS = (  # columns of a run that trains a draft model
    _Column("loss", 7, "bold green", _number("mtp/loss", ".3f")),
    _Column("accept. by depth", 20, "magenta", _by_depth),
    _Column("s/step", 7, "", _number("timing_s/step", ".1f")),
)
DRAFT_TRENDS = (
    ("loss", "mtp/loss", ".3f", "green"),
    ("accept. depth 1", "mtp/alpha/depth_1", ".3f", "magenta"),
)
TRENDS = (  # (label, metric, format, style)
    ("reward", REWARD, ".3f", "green"),
    ("entropy", "rollout/entropy", ".3f", "blue"),
    ("accept. length", "spec/acceptance_length", ".2f", "magenta"),
    ("tokens/s", "perf/tokens_per_s/rollout", ",.0f", "yellow"),
)


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars between their smallest and largest; equal values as a line at half height.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5])
    ('▁▃▆█', '▄▄')
    """
    if not values:
        return ""

    low, high = min(values), max(values)
    if high == low:
        return BARS[3] * len(values)
    return "".join(BARS[round((v - low) / (high - low) * (len(BARS) - 1))] for v in values)


def duration(seconds: float) -> str:
    """Format seconds for a reader.

    >>> duration(8.4), duration(192), duration(7500)
    ('8s', '3m12s', '2h05m')
    """
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


_ASCII = str.maketrans({"±": "+-", "→": "->", "≤": "<=", "×": "x"})


class ConsoleSink:
    """Displays a run. console: standard output by default; tests pass another."""

    name = "console"

    def __init__(self, header: Header, console: Console | None = None) -> None:
        self._header = header
        self._console = console
        self._live: Live | None = None
        self._rows = 0
        self._step = 0
        self._phase = "starting"
        self._started = time.time()
        self._clock: deque[tuple[int, float]] = deque(maxlen=12)  # (step, time) of recent records
        self._columns = DRAFT_COLUMNS if header.trains_draft else COLUMNS
        self._trend_rows = DRAFT_TRENDS if header.trains_draft else TRENDS
        self._trends = {name: deque(maxlen=TREND) for _, name, _, _ in self._trend_rows}
        self._validations: list[dict[str, Any]] = []
        self._since, self._validated_in = self._started, 0.0  # phase's start; seconds of a validation

    def open(self) -> None:
        """Print the header; on a terminal, start the live panel."""
        from rich.console import Console

        self._console = self._console or Console(highlight=False)
        self._clock.append((0, self._started))

        if not self._fancy:
            details = "".join(f" | {label}: {text}" for label, text in self._header.details)
            self._plain(f"rlpipe {self._header.title}{details} | steps: {self._header.total_steps}")
            return

        from rich.live import Live

        self._terminal.print(self._header_panel())
        self._live = Live(
            get_renderable=self._panel,
            console=self._terminal,
            refresh_per_second=2,
            vertical_overflow="visible",
        )
        self._live.start()
        self._terminal.show_cursor(show=True)  # a run that is killed leaves a usable terminal

    def record(self, record: dict[str, Any]) -> None:
        """Print one row (or line) for the step."""
        self._step = record[STEP]
        if self._clock[-1][0] > self._step or not self._rows:  # after a resume, or at first: pace unknown
            self._clock.clear()
        self._clock.append((self._step, record["time"]))

        # Metrics that were not measured in this step leave no gap in a trend.
        for name, values in self._trends.items():
            if record.get(name) is not None:
                values.append(record[name])
        if record.get("val/reward") is not None:
            self._validations.append(record)
            self._validated_in = record.get("timing_s/validate") or 0.0

        self._enter("training")

        # Step 0 has a row only if there was a validation before the first step.
        if not (self._step or any(column.cell(record) for column in self._columns)):
            return

        if self._fancy:
            if self._rows % TITLES_EVERY == 0:
                self._terminal.print(self._titles())
            self._terminal.print(self._row(record))
        else:
            self._plain(self._line(record))
        self._rows += 1

        # The validation column shows only the primary set.
        if names := _validated_sets(record):
            sets = "  ".join(f"{name} {_validation(record, f'val/{name}')}" for name in names)
            self._detail(f"held-out: {sets}", "cyan")

        due = self._step % SPLIT_EVERY == 0 or self._step == self._header.total_steps
        if due and (split := _split(record)):
            self._detail(split, "magenta")

    def event(self, event: dict[str, Any]) -> None:
        """Print warnings, faults and a few other events as a line; `phase` changes the panel."""
        if event["kind"] == "phase":
            self._enter(str(event.get("message", "")))
            if not self._fancy:
                self._plain(f"[phase] {self._phase}")
            return
        if event["kind"] == "resumed":
            self._step = event["step"]

        # Other events of level info are only in the events file.
        level = Level(event["level"])
        if level is Level.INFO and event["kind"] not in SHOWN_EVENTS:
            return

        fields = {k: v for k, v in event.items() if k not in ("time", "kind", "level")}
        text = "  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items())
        if event["kind"] == "advice":
            text = str(event.get("text", ""))
        elif event["kind"] == "sample":
            text = _sample_text(event)
        elif event["kind"] == "waiting":
            text = f"{duration(event['seconds'])} for {event['what']}"

        if not self._fancy:
            self._plain(f"[{level}] {event['kind']}  {text}")
            return

        mark, style = MARKS[level]
        self._detail(f"{mark} {event['kind']}  {text}", style)

    def close(self) -> None:
        """Leave the last state of the panel on the screen, and print the outcome."""
        total = self._header.total_steps
        self._enter("finished" if self._step >= total else "stopped")

        if self._live is not None:
            self._live.stop()
        if not self._fancy:
            progress = f"/{total}" if self._step <= total else f", {total} were requested"
            self._plain(f"{self._phase} after step {self._step}{progress}{self._outcome()}")

        if self._step < total:
            hint = "Run the same command to continue."
            self._terminal.print(hint) if self._fancy else self._plain(hint)

    def _detail(self, text: str, style: str) -> None:
        """Print an indented line; on a terminal, wrap it so that nothing is cut off."""
        if not self._fancy:
            self._plain(f"  {text}")
            return

        from rich.padding import Padding
        from rich.text import Text

        line = Text(text, style=style, overflow="fold")
        self._terminal.print(Padding(line, (0, 0, 0, 2), expand=False))

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.time()

    @property
    def _terminal(self) -> Console:
        assert self._console is not None, "open comes first"
        return self._console

    @property
    def _fancy(self) -> bool:
        return self._terminal.is_terminal and self._terminal.encoding.startswith("utf")

    def _seconds_left(self) -> float | None:
        (first, began), (last, ended) = self._clock[0], self._clock[-1]
        if last <= first:
            return None
        return (ended - began) / (last - first) * max(0, self._header.total_steps - last)

    def _outcome(self) -> str:
        """Return the held-out rewards before and after, for the last line."""
        if not self._validations:
            return ""
        first, *later = self._validations
        last = later[-1] if later else first

        # A reward that no earlier process measured is compared with the first validation.
        before = (first if later else {}) | self._header.baseline
        text = ""
        for name, under in [("val reward", "val"), *((n, f"val/{n}") for n in _validated_sets(last))]:
            reward = before.get(f"{under}/reward")
            arrow = "" if reward is None else f"{_short(reward)} → "
            text += f"   {name} {arrow}{_validation(last, under)}"
        return text

    # --- plain -------------------------------------------------------------------------------------

    def _plain(self, line: str) -> None:
        text = line.translate(_ASCII).encode("ascii", "replace").decode()
        self._terminal.file.write(text + "\n")
        self._terminal.file.flush()

    def _line(self, record: dict[str, Any]) -> str:
        width = len(str(self._header.total_steps))
        parts = [f"step {self._step:>{width}}/{self._header.total_steps}"]
        parts += [f"{c.title} {cell}" for c in self._columns if (cell := c.cell(record))]

        left = self._seconds_left()
        return "  ".join(parts + ([f"eta {duration(left)}"] if left is not None else []))

    # --- rich --------------------------------------------------------------------------------------

    def _header_panel(self) -> RenderableType:
        """Return the panel with the settings of the run."""
        from rich import box
        from rich.panel import Panel
        from rich.table import Table

        details = Table.grid(padding=(0, 2))
        details.add_column(style="dim", no_wrap=True)
        details.add_column(overflow="fold")
        for label, text in self._header.details:
            details.add_row(label, text)

        title = f"[bold]rlpipe[/bold] · [bold cyan]{self._header.title}[/bold cyan]"
        return Panel(
            details, title=title, title_align="left", box=box.ROUNDED, border_style="bright_black", width=78
        )

    def _aligned(self, first: str, texts: Sequence[str], styles: Sequence[str]) -> Text:
        """Return a row of the table, each text in the width of its column."""
        from rich.text import Text

        row = Text(no_wrap=True, overflow="ellipsis").append(first, style="dim")

        for column, text, style in zip(self._columns, texts, styles, strict=True):
            row.append(f"{text:>{column.width}}", style=style)
            row.append(" ")
        return row

    def _titles(self) -> Text:
        return self._aligned(
            f"{'step':>8}   ", [c.title for c in self._columns], ["dim"] * len(self._columns)
        )

    def _row(self, record: dict[str, Any]) -> Text:
        step = f"{self._step:>8}   "
        return self._aligned(step, [c.cell(record) for c in self._columns], [c.style for c in self._columns])

    def _panel(self) -> RenderableType:
        """Return the live panel: trends, progress, phase."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = self._header.total_steps
        trends = Table.grid(padding=(0, 2))
        for label, name, spec, style in self._trend_rows:
            if values := self._trends[name]:
                trends.add_row(
                    Text(f"  {label:<14}", style="dim"),
                    Text(f"{sparkline(values):<{TREND}}", style=style),
                    Text(format(values[-1], spec), style=f"bold {style}"),
                )

        elapsed = duration(time.time() - self._started)
        left = self._seconds_left() if self._step < total else None
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            " ",
            ProgressBar(total=total, completed=self._step, width=30, complete_style="green"),
            Text(f"{self._step}/{total}", style="bold"),
            Text(f"{elapsed} elapsed" + ("" if left is None else f", {duration(left)} left"), style="dim"),
        )

        busy = duration(time.time() - self._since)
        if self._phase.startswith("validating") and self._validated_in:
            busy += f" of about {duration(self._validated_in)}"
        progress_line = Text(f"  · {self._phase}, {busy}", style="cyan", overflow="fold")

        parts: list[RenderableType] = [Text(""), trends, progress, progress_line]
        if outcome := self._outcome():
            parts.append(Padding(Text(outcome.strip(), style="bold cyan"), (0, 0, 0, 2)))

        return Group(*parts)
