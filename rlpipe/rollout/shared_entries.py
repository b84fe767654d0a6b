"""What SGLang's processes keep in /dev/shm, so that it can be removed when they were killed.

A killed server unlinks nothing: 16 KiB and some semaphores for each start. Flow: once a server is ready, the
entries of its process group are written down in a file named after our process; whoever ends the server
removes them, else `sweep` does, when our process is dead too.
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
    """Write down what the processes of a group keep now; returns the file. Sweeps, too."""
    sweep()
    file = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getpid()}-{group}")
    file.write_text(json.dumps(sorted({name for pid in psutil.pids() for name in _entries(pid, group)})))
    return file


def remove(file: Path) -> None:
    """Delete what a file of `note` names, then the file."""
    with contextlib.suppress(FileNotFoundError):  # a temporary folder may be tidied
        for name in json.loads(file.read_text()):
            if (path := Path(name)).parent == _SHARED:
                path.unlink(missing_ok=True)
        file.unlink()


def sweep() -> None:
    """`remove` for all processes of ours that are dead."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):  # another sweeps it as well, or it is no file of ours
            pid = int(file.name.removeprefix(_PREFIX).partition("-")[0])
            if file.lstat().st_uid == os.geteuid() and not _lives(pid):
                remove(file)


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _entries(pid: int, group: int) -> Iterator[str]:
    """Paths in /dev/shm that a process of the group maps."""
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == group:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            names = (line.partition(f" {_SHARED}/")[2] for line in lines)
            yield from (str(_SHARED / name) for name in names if name and not name.endswith(" (deleted)"))
