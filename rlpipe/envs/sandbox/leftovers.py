"""Removes leftovers of killed processes' sandboxes: folders of commands, and control groups.

Both are named after the process that made them and its run. Loads neither mini-swe-agent nor torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.tree import remove_tree, scratch

MARK = "RLPIPE_RUN_MARK"  # the variable that all processes of a run inherit
NOBODY = 65534
_PREFIX = "rlpipe-sandbox-"


def prefix() -> str:
    """Return the beginning of names of this process: its id, then the mark of its run, if it has one."""
    return f"{_PREFIX}{os.getpid()}-{os.environ.get(MARK, '')}-"


def leftovers(mark: str = "") -> list[Path]:
    """Return folders and groups of this user's killed processes, or of the run of that mark."""
    own_users = {os.geteuid(), NOBODY} if os.geteuid() == 0 else {os.geteuid()}
    paths = []
    for path in [*scratch().glob(f"{_PREFIX}*"), *cgroup.groups(_PREFIX)]:
        pid, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        # Another start may remove the same path at this moment.
        with contextlib.suppress(OSError):
            dead = pid.isdigit() and not psutil.pid_exists(int(pid))
            if (dead or (mark and rest.startswith(mark))) and path.lstat().st_uid in own_users:
                paths.append(path)
    return paths


def remove_leftovers(mark: str = "") -> int:
    """Remove the `leftovers`; return how many."""
    removed = 0
    for path in leftovers(mark):
        with contextlib.suppress(OSError):
            (remove_tree if path.parent == scratch() else cgroup.remove)(path)
            removed += 1
    return removed
