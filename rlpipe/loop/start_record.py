"""Records how a run was started: `starts.jsonl` has a line for every start, with all data for a restart."""

from __future__ import annotations

import getpass
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

STARTS = "starts.jsonl"
_GIT_S = 10.0


def record_start(run_dir: Path) -> dict[str, Any]:
    """Append this start to `starts.jsonl` of a run directory, and return its record."""
    described = [found.metadata for found in distributions()]  # each access parses a file
    packages = {one["Name"]: one["Version"] for one in described if one["Name"]}
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "user": _user(),
        "pid": os.getpid(),
        "rlpipe": packages.get("rlpipe", ""),
        "commit": commit_of(Path(__file__).resolve().parents[2]),
        "folder_commit": commit_of(Path.cwd()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }
    with (run_dir / STARTS).open("a") as file:
        file.write(json.dumps(start, ensure_ascii=False) + "\n")
    return start


def commit_of(folder: Path) -> str | None:
    """Return the commit of the git checkout that a folder is in, with "+" if files were changed.

    Returns None without git, outside of a checkout, or if another user owns the checkout.
    """

    def git(*words: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container without this user
        return str(os.getuid())
