"""The harness of all benches: arms in turns, warm-up, repeats, ratios, provenance, JSON and a table.

This module measures and writes results; a bench states its question, its arms and its sizes. Arms take turns
within a repeat, in an order that is reversed every other repeat, so that a disturbance or a slow drift of the
machine affects all of them equally. A ratio is the median over repeats of the ratio within a repeat. The
clock is an argument, so that a test can plant speeds and check that they are reported.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]

Arm = Callable[[], object]  # does one repeat's work; a number it returns is the amount of that work
Clock = Callable[[], float]  # seconds
Load = tuple[float, float, float]


def git(*command: str) -> str:
    """Return what git prints about this checkout.

    Raises:
        subprocess.CalledProcessError: this is not a checkout.
    """
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    """Return the full hash of the commit that is checked out."""
    return git("rev-parse", "HEAD")


def bench_parser(description: str | None, *, repeats: int | None = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that benches share: --json and, unless None, --repeats."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the result")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="of every arm, after a warm-up")
    return parser


@dataclass(slots=True)
class Samples:
    """Seconds and amounts of work of each arm, one entry per repeat.

    >>> samples = Samples(seconds={"ours": [1.0, 1.0], "theirs": [2.0, 4.0]})
    >>> samples.ratio("theirs", "ours")
    3.0
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, list[float]] = field(default_factory=dict)

    def rates(self, arm: str) -> list[float]:
        """Return the work per second of each repeat of an arm."""
        return [work / seconds for work, seconds in zip(self.work[arm], self.seconds[arm], strict=True)]

    def ratio(self, slow: str, fast: str) -> float:
        """Return the time of the arm `slow` divided by the time of `fast`, for the same work."""
        return paired_ratio(self._costs(slow), self._costs(fast))

    def ratios(self, pairs: Iterable[tuple[str, str]], *, digits: int = 2) -> dict[str, float]:
        """Return the ratio of each pair (slow, fast) whose arms were both measured."""
        return {
            f"{slow} / {fast}": round(self.ratio(slow, fast), digits)
            for slow, fast in pairs
            if slow in self.seconds and fast in self.seconds
        }

    def _costs(self, arm: str) -> list[float]:
        if arm not in self.work:
            return self.seconds[arm]
        return [1 / rate for rate in self.rates(arm)]


def take_turns(
    arms: Mapping[str, Arm], repeats: int, *, warm_up: int = 1, clock: Clock = time.perf_counter
) -> Samples:
    """Run the arms in turns and return the samples of each.

    Args:
        arms: by name. What an arm returns, if it is a number, is the work it did (tokens, bytes, calls).
        repeats: rounds that are counted; the order of the arms is reversed in every other one.
        warm_up: rounds before the counted ones.
        clock: seconds; a test passes its own.

    Raises:
        ValueError: no round is counted, or the clock did not advance while an arm ran, so it has no speed.
    """
    if repeats < 1 or not arms:
        raise ValueError(f"{repeats} repeats of {len(arms)} arms measure nothing: give one of each at least.")

    samples = Samples({name: [] for name in arms})
    for repeat in range(-warm_up, repeats):
        order = list(arms) if repeat % 2 == 0 else list(reversed(arms))
        for name in order:
            started = clock()
            work = arms[name]()
            seconds = clock() - started

            if repeat < 0:
                continue
            if seconds <= 0:
                raise ValueError(f"arm {name!r} took {seconds} s: give it more work than the clock can miss.")
            samples.seconds[name].append(seconds)
            if isinstance(work, int | float) and not isinstance(work, bool):
                samples.work.setdefault(name, []).append(float(work))
    return samples


def repeated(arm: Callable[[], object], calls: int, synchronize: Callable[[], None] = lambda: None) -> Arm:
    """Return an arm that makes `calls` calls, which count as its work. synchronize: waits for the device."""

    def run() -> int:
        for _ in range(calls):
            arm()
        synchronize()
        return calls

    return run


def calls_for(
    arm: Callable[[], object],
    budget_s: float,
    *,
    most: int = 200,
    synchronize: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> int:
    """Return how many calls of an arm fill `budget_s` seconds, between 1 and `most`. Calls the arm once."""
    started = clock()
    arm()
    synchronize()
    return min(most, max(1, int(budget_s / max(clock() - started, 1e-9))))


class ArmProcess:
    """An arm in a separate process, because thread pools and caches of one arm slow another down.

    `make` is called in that process and returns an object with a method `run`. Between calls the process and
    its children are stopped (SIGSTOP), because a server that polls would take a core from the arm whose turn
    it is. Each process is started before the next, so that an arm that measures its own costs is not
    disturbed.
    """

    def __init__(self, make: Callable[[], Any], *, prepare: Callable[[], None] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve_arm, args=(remote, make, prepare), daemon=True)
        self._process.start()
        self._receive()
        self._signal(signal.SIGSTOP)
        # A stopped process would not end with this one.
        atexit.register(self._signal, signal.SIGCONT)

    def run(self, *arguments: Any) -> Any:
        """Call `run` in the arm's process and return its result.

        Raises:
            RuntimeError: `run` raised; the message has its traceback.
        """
        self._signal(signal.SIGCONT)
        self._pipe.send(arguments)
        try:
            return self._receive()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        self._pipe.send(None)
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children; children that ended meanwhile are ignored."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for member in (*process.children(recursive=True), process):
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)

    def _receive(self) -> Any:
        failure, value = self._pipe.recv()
        if failure:
            raise RuntimeError(f"an arm failed in its process:\n{failure}")
        return value


def _serve_arm(pipe: Any, make: Callable[[], Any], prepare: Callable[[], None] | None) -> None:
    """Make the arm, then run it once for every message from the pipe, until None."""
    arm = None
    try:
        if prepare is not None:
            prepare()
        arm = make()
        pipe.send((None, None))
        while (arguments := pipe.recv()) is not None:
            pipe.send((None, arm.run(*arguments)))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    finally:
        if hasattr(arm, "close"):
            arm.close()


@dataclass(slots=True, frozen=True)
class Span:
    """One request: its begin and end in seconds, and the number of tokens that it generated."""

    start: float
    end: float
    tokens: int


def full_batch_rate(spans: Sequence[Span], batch: int) -> float:
    """Return the tokens per second of a server at full batch, from requests of which `batch` run at once.

    The window is the time in which the batch was full. It begins when a request fills the batch, and ends
    when a request ends that no waiting request replaces. A request's tokens are spread evenly over its time;
    the tokens inside the window count. The rate between request ends would not work: if all requests of a
    batch end together, no time passes between two ends, and the speed is unbounded.

    >>> spans = [Span(t, t + 1, 100) for t in (0.0, 1.0, 2.0) for _ in range(8)]
    >>> full_batch_rate(spans, 8)
    800.0

    Raises:
        ValueError: the batch was never full, or more than `batch` requests ran at once.
    """
    if len(spans) < 2 * batch:
        raise ValueError(f"{len(spans)} requests cannot keep a batch of {batch} full: queue twice as many.")
    starts, ends = sorted(s.start for s in spans), sorted(s.end for s in spans)

    # A request may start only after the one `batch` positions before it has ended.
    if any(start < end for start, end in zip(starts[batch:], ends, strict=False)):
        raise ValueError(f"more than {batch} requests ran at once: bound them before measuring that batch.")

    opened, closed = starts[batch - 1], ends[len(spans) - batch]
    if closed <= opened:
        raise ValueError(f"a batch of {batch} was full for {closed - opened} s: queue more requests.")

    inside = 0.0
    for span in spans:
        overlap = min(span.end, closed) - max(span.start, opened)
        if overlap > 0:
            inside += span.tokens * overlap / (span.end - span.start)
    return inside / (closed - opened)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over repeats of the ratio within a repeat."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def spread(values: Sequence[float], *, digits: int = 1) -> dict[str, Any]:
    """Return median, minimum and maximum, rounded.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min_max': [1.0, 3.0]}
    """
    return {
        "median": round(statistics.median(values), digits),
        "min_max": [round(min(values), digits), round(max(values), digits)],
    }


def load_average() -> Load:
    """Return the load of the machine over 1, 5 and 15 minutes."""
    return os.getloadavg()


def device_name(device: str = "cpu") -> str:
    """Return the name of the GPU, or of the processor as the system names it."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance(
    settings: argparse.Namespace | Mapping[str, Any],
    load_before: Load,
    *,
    packages: Sequence[str] = ("torch",),
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the provenance of figures: commit, date, versions, device, load before and after, settings.

    instructions: the largest set that torch uses on this CPU, since speeds of AVX2 and AVX-512 differ.
    """
    import torch

    values = settings if isinstance(settings, Mapping) else vars(settings)
    return {
        "commit": commit(),
        "modified": bool(git("status", "--porcelain", "rlpipe")),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "load_average_after": load_average(),
        "config": {name: _plain(value) for name, value in values.items() if name != "json"},
    }


def _plain(value: Any) -> Any:
    """Return a setting as a JSON value. Paths inside the checkout become relative, others only a name."""
    if not isinstance(value, Path):
        return value
    path = value.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return rows as text, one line each, with a column for every key that any row has.

    >>> print(table({"ours": {"ms": 1.5}, "theirs": {"ms": 12.25}}))
            ms
    ours    1.5
    theirs  12.25
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["", *columns]]
    lines += [[name, *(str(row.get(column, "")) for column in columns)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write_result(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON. Does nothing if `out` is None."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
