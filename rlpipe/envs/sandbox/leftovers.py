"""Removes what the sandboxes of killed processes left: folders of commands, and control groups.

The names of both contain the process and the run that made them. Imports neither mini-swe-agent nor torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.tree import remove_tree, scratch

MARK = "RLPIPE_RUN_MARK"  # environment variable that all processes of a run inherit
NOBODY = 65534
_PREFIX = "rlpipe-sandbox-"


def prefix() -> str:
    """Return the prefix of this process's names: the process id, then the mark of the run, if any."""
    return f"{_PREFIX}{os.getpid()}-{os.environ.get(MARK, '')}-"


def leftovers(mark: str = "") -> list[Path]:
    """Return folders and groups of this user that belong to killed processes or to the run with this mark."""
    own_users = {os.geteuid(), NOBODY} if os.geteuid() == 0 else {os.geteuid()}
    paths = []
    for path in [*scratch().glob(f"{_PREFIX}*"), *cgroup.groups(_PREFIX)]:
        pid, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        # Another run that starts now may remove the same path.
        with contextlib.suppress(OSError):
            dead = pid.isdigit() and not psutil.pid_exists(int(pid))
            if (dead or (mark and rest.startswith(mark))) and path.lstat().st_uid in own_users:
                paths.append(path)
    return paths


def remove_leftovers(mark: str = "") -> int:
    """Remove the `leftovers`; return the number of removed paths."""
    removed = 0
    for path in leftovers(mark):
        with contextlib.suppress(OSError):
            if path.parent == scratch():
                remove_tree(path)
            else:
                cgroup.remove(path)
            removed += 1
    return removed
