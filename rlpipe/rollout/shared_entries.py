"""Removes the entries that killed SGLang processes leave in /dev/shm.

A killed server leaves 16 KiB and some semaphores behind. When a server is ready, the entries of its process
group are listed in a file named after this process. They are removed when the server is stopped or, if this
process dies before that, by `remove_leftovers` in another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_SHARED = Path("/dev/shm")
_PREFIX = "rlpipe-shared-entries-"


def note(group: int) -> Path:
    """Remove leftovers; list the current entries of a process group in a file, and return the file."""
    remove_leftovers()
    file = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getpid()}-{group}")
    file.write_text(json.dumps(sorted({name for pid in psutil.pids() for name in _entries(pid, group)})))
    return file


def remove(file: Path) -> None:
    """Delete the entries listed in a file that `note` wrote, then the file."""
    with contextlib.suppress(FileNotFoundError):  # another program may have cleaned the temporary folder
        for name in json.loads(file.read_text()):
            if (path := Path(name)).parent == _SHARED:
                path.unlink(missing_ok=True)
        file.unlink()


def remove_leftovers() -> None:
    """Remove the entries listed by processes of this user that are dead."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another process may have removed the file, or it may not be from `note`.
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.name.removeprefix(_PREFIX).partition("-")[0])
            if file.lstat().st_uid == os.geteuid() and not _is_alive(pid):
                remove(file)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _entries(pid: int, group: int) -> Iterator[str]:
    """Yield the paths in /dev/shm that a process of the group maps."""
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == group:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = (line.partition(f" {_SHARED}/")[2] for line in lines)
            yield from (str(_SHARED / name) for name in names if name and not name.endswith(" (deleted)"))
