"""Run the real command line in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "run.steps=2",
    "run.save_every=1",
    "pipeline.prompts_per_step=2",
    "pipeline.group_size=4",
    "val.instances=4",
    "val.every=2",
]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user without settings of their own; rlpipe comes from this checkout."""
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")}
    return keep | {"PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")} | extra


def command(*overrides: str) -> list[str]:
    """`python -m rlpipe.run` with overrides."""
    return [sys.executable, "-m", "rlpipe.run", *overrides]


def run(*overrides: str, cwd: Path, timeout: float = 300, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(*overrides),
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


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
