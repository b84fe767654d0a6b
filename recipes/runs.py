"""What the studies share: a run of a recipe in a process of its own, unless it is complete already."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def play(recipe: str, directory: Path, *overrides: str, afresh: bool = False) -> Path:
    """`python -m rlpipe.run +recipe=RECIPE`, unless it ended well; returns the directory.

    An interrupted run goes on, or, with afresh, starts again. Raises CalledProcessError.
    """
    events = directory / "events.jsonl"
    if not (events.is_file() and '"outcome": "done"' in events.read_text()):
        if afresh:
            shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, "-m", "rlpipe.run", f"+recipe={recipe}", f"run.dir={directory}"]
        subprocess.run([*command, *overrides], check=True)
    return directory
