"""The processes below one, read once for all sandboxes that look at about the same time.

n sandboxes have a multiple of n processes. If each sandbox read all of them at each look, the time of looking
would grow with the square of n: with 192 sandboxes it held up the engine in the same process.
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
    """Return the processes below one, as they were at most `max_age_s` seconds ago."""
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
        with contextlib.suppress(OSError):  # it ended just now
            # PID (NAME) STATE PARENT ...; a name may hold anything.
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children[parent].append(int(process.name))
    return children
