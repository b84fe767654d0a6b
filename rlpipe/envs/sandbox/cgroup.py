"""Control groups of the kernel: limits on memory, processes and CPU that hold even in a burst.

Owns the choice of controllers that this process may use, and the groups of one command. Version 2 is used if
this process's group or one above it delegates its controllers. Otherwise, version 1 is used with every
hierarchy in which this process's group is writable. A group also counts memory that no process owns: tmpfs,
pipes, page tables, socket buffers. Without controllers there are no groups, and only the monitor of processes
limits memory. Imports only the standard library, since `scripts/doctor` runs this module before anything is
installed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_DEATH_S = 10.0
# Files that may be missing: some kernels do not count swap, and version 2 counts TCP with all other memory.
_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
_numbers = itertools.count()


class Group:
    """The control groups of one command, created empty.

    parents: result of `controllers`. memory: limit in bytes, including swap. processes: maximum number of
    live threads. cores: CPU seconds per second. Raises OSError if a group cannot be created.
    """

    def __init__(
        self, name: str, parents: Mapping[str, Path], *, memory: int, processes: int, cores: float
    ) -> None:
        name = f"{name}-{next(_numbers)}"
        self._at = {controller: parent / name for controller, parent in parents.items()}
        self.controllers = frozenset(self._at)
        self.paths = sorted(set(self._at.values()))
        try:
            for path in self.paths:
                path.mkdir()
            for controller, path in self._at.items():
                for file, value in bounds(controller, is_version_2(path), memory, processes, cores).items():
                    if file not in _OPTIONAL or (path / file).exists():
                        (path / file).write_text(value)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the groups; its later children also belong to them. Raises OSError."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel ended a process because the group reached its memory limit."""
        at = self._at.get("memory")
        if at is None:
            return False

        text = (at / ("memory.events" if is_version_2(at) else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"]) > 0

    def remove(self) -> None:
        """End all processes in the groups, and delete the groups; give up after some seconds."""
        for path in self.paths:
            remove(path)


def bounds(controller: str, version_2: bool, memory: int, processes: int, cores: float) -> dict[str, str]:
    """Return the values to write into the files of a group, in the order of writing.

    >>> bounds("cpu", True, memory=1, processes=1, cores=1.5)
    {'cpu.max': '150000 100000'}
    """
    if controller == "pids":
        return {"pids.max": str(processes)}
    if controller == "cpu":
        quota = str(round(cores * _PERIOD_US))
        if version_2:
            return {"cpu.max": f"{quota} {_PERIOD_US}"}
        return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota}

    if version_2:
        return {"memory.max": str(memory), "memory.swap.max": "0"}
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
    return dict.fromkeys(names, str(memory))


def remove(path: Path) -> None:
    """End the processes of a group and delete it; gives up after some seconds."""
    deadline = time.monotonic() + _DEATH_S
    while time.monotonic() < deadline:
        try:
            return path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            # A group with processes cannot be removed, and a killed process takes a moment to disappear.
            with contextlib.suppress(OSError):
                for pid in (path / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.005)


def groups(prefix: str) -> Iterator[Path]:
    """Yield all groups of this machine whose name begins with `prefix`."""
    for root in sorted({root for _, root, _ in _hierarchies()}):
        for directory, names, _ in os.walk(root):
            yield from (Path(directory, name) for name in names if name.startswith(prefix))
            names[:] = [name for name in names if not name.startswith(prefix)]


@functools.cache
def controllers() -> dict[str, Path]:
    """Return the usable controllers: name -> the group in which to make new groups."""
    candidates = parents()
    if not candidates:
        return {}

    # Only a trial shows whether the kernel lets this user create groups.
    try:
        group = Group(f"rlpipe-probe-{os.getpid()}", candidates, memory=64 << 20, processes=8, cores=1.0)
    except OSError:
        return {}
    try:
        with subprocess.Popen(["sleep", "60"]) as process:
            try:
                group.add(process.pid)
            finally:
                process.kill()
        return candidates
    except OSError:
        return {}
    finally:
        group.remove()


def parents(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Return, for each controller, the group in which file permissions allow new groups."""
    by_controller: dict[str, Path] = {}
    for types, root, own in _hierarchies(proc):
        for controller in types & set(CONTROLLERS):
            if os.access(own, os.W_OK):
                by_controller[controller] = own

        # Version 2 has one hierarchy: take the nearest ancestor group that delegates all controllers.
        if not types:
            for above in (own, *own.parents):
                handed = above / "cgroup.subtree_control"
                if not above.is_relative_to(root) or not handed.exists():
                    break
                if set(handed.read_text().split()) >= set(CONTROLLERS) and os.access(above, os.W_OK):
                    return dict.fromkeys(CONTROLLERS, above)
    return by_controller


def is_version_2(group: Path) -> bool:
    """Return whether a group belongs to the unified hierarchy of version 2."""
    return (group / "cgroup.controllers").exists()


def _hierarchies(proc: Path = Path("/proc/self")) -> list[tuple[set[str], Path, Path]]:
    """Return (controllers, mount point, group of this process) of each hierarchy.

    The set of controllers is empty for version 2.
    """
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return []

    fields = (line.split(":", 2) for line in memberships)
    own = {frozenset(filter(None, names.split(","))): path for _, names, path in fields}

    hierarchies = []
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], set(mount[-1].split(","))
        if kind not in ("cgroup", "cgroup2"):
            continue

        for names, path in own.items():
            if names <= options if kind == "cgroup" and names else kind == "cgroup2" and not names:
                below = os.path.relpath(path, mount[3])
                if not below.startswith(".."):
                    hierarchies.append((set(names), Path(mount[4]), Path(mount[4]) / below))
    return hierarchies
