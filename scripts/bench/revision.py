"""Which revision of the code a benchmark measures."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*command: str) -> str:
    """What git prints about this checkout; raises CalledProcessError where it is none."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    """The full hash of the commit that is checked out."""
    return git("rev-parse", "HEAD")
