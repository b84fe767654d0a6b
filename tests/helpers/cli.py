"""Run the real command line in a process of its own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.names import EVENTS, declared
from tests.helpers.processes import run_command

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "run.steps=2",
    "run.save_every=1",
    "pipeline.prompts_per_step=2",
    "pipeline.group_size=4",
    "val.instances=4",
    "val.every=2",
    "metrics.wandb=off",  # W&B takes a sixth of a short run's CPU time, most of it for imports
]
WITH_WANDB = [setting for setting in SMALL if not setting.startswith("metrics.wandb")]
STARTED: list[str] = []  # marks of the runs that the current test started


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user without settings of their own; rlpipe comes from this checkout."""
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")}
    return keep | {"PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")} | extra


@contextmanager
def newcomers_folder(prefix: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """An empty folder, and the environment of a user with an empty home and no GPU; removed at exit."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder, home = Path(name) / "work", Path(name) / "home"
        home.mkdir()
        folder.mkdir()
        yield folder, environment(HOME=str(home), NETRC=f"{name}/netrc", CUDA_VISIBLE_DEVICES="")


def command(*overrides: str) -> list[str]:
    """`rlpipe run` with overrides."""
    return [sys.executable, "-m", "rlpipe.run", *overrides]


def starts_ray(overrides: Sequence[str]) -> bool:
    """Whether a run with overrides is on Ray: by its setting, else by its recipe."""
    for one in overrides:
        if one.startswith("cluster="):
            return one != "cluster=inline"
    return not any(one.removeprefix("+recipe=") in _inline_recipes() for one in overrides)


@cache
def _inline_recipes() -> frozenset[str]:
    """Names of the recipes, and of those that begin with one of them, that run in one process."""
    texts = {path.stem: path.read_text() for path in (ROOT / "configs" / "recipe").glob("*.yaml")}
    names = {name for name, text in texts.items() if "override /cluster: inline" in text}
    return frozenset(
        names | {name for name, text in texts.items() for other in names if f"- {other}\n" in text}
    )


def run(
    *overrides: str, cwd: Path, timeout: float = 300, fresh: bool | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; a run without Ray in a process that has its imports already.

    fresh: in a new interpreter, so that the output has what libraries say when they are imported. False also
    for a run with Ray, of which it is known that it starts nothing.
    """
    if fresh is None:
        fresh = starts_ray(overrides)
    if not fresh:
        return run_command(["run", *overrides], cwd=cwd, environment=environment(**extra), timeout=timeout)
    return subprocess.run(
        command(*overrides),
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def start(
    *overrides: str, cwd: Path, lines: int = 1, timeout: float = 300
) -> tuple[subprocess.Popen[str], str]:
    """Start a run in `cwd`/out and wait until its metrics have some lines.

    Returns the process, the leader of a session of its own, and its mark (see `marked_processes`).
    """
    marker = uuid.uuid4().hex
    STARTED.append(marker)
    process = subprocess.Popen(
        command(*overrides, "run.dir=out"),
        cwd=cwd,
        env=environment(RLPIPE_TEST_MARK=marker),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = cwd / "out" / "metrics.jsonl", time.monotonic() + timeout
    while not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        if process.poll() is not None or time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # output ends with the last process that holds it
            raise AssertionError(f"{lines} lines of metrics were not there: {process.communicate()[0]}")
        time.sleep(0.1)
    return process, marker


def end_started() -> None:
    """Kill what lives of the runs that a test started: one that failed must not take a core from the next."""
    while STARTED:
        marker = STARTED.pop()
        while left := marked_processes(marker):  # until nothing starts another
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def undeclared(directory: Path) -> list[str]:
    """Metrics and kinds of events in the files of a run that the catalogue does not have."""
    records, events = (read_jsonl(directory / f"{name}.jsonl")[0] for name in ("metrics", "events"))
    missing = [event["kind"] for event in events if event["kind"] not in EVENTS]
    for name in {name for record in records for name in record} - {"time"}:
        try:
            declared(name)
        except ValueError:
            missing.append(name)
    assert records and events, f"{directory} has no records, or no events"
    return missing


def prompt_states(directory: Path) -> dict[str, int]:
    """Number of prompts by state, from the ledger of a run directory."""
    with sqlite3.connect(directory / "ledger.sqlite") as db:
        return dict(db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())


def marked_processes(marker: str) -> list[psutil.Process]:
    """Processes whose environment carries RLPIPE_TEST_MARK=marker: all that a test's run started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLPIPE_TEST_MARK") == marker and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
