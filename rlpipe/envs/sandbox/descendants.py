"""Lists the descendants of a process; sandboxes that ask at about the same time share one reading.

n sandboxes have a multiple of n processes. If each sandbox read all processes at each check, the time would
grow with the square of n: with 192 sandboxes this slowed down the engine in the same process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from pathlib import Path

_lock = threading.Lock()
_read_at = float("-inf")
_children: dict[int, list[int]] = {}


def descendants(pid: int, *, max_age_s: float) -> list[int]:
    """Return the descendants of a process, from a list that is at most `max_age_s` seconds old."""
    global _read_at, _children
    with _lock:
        if time.monotonic() - _read_at > max_age_s:
            _children, _read_at = _read_children(), time.monotonic()
        children = _children

    found = [pid]
    for parent in found:
        found += children.get(parent, ())
    return found[1:]


def _read_children() -> dict[int, list[int]]:
    """Return the children of every process of this machine."""
    children = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            # Format: PID (NAME) STATE PARENT ...; the name may contain any character.
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children[parent].append(int(process.name))
    return children
