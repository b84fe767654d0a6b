"""A run that a test kills, and what must be gone after it: all that its processes were and held."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.leftovers import MARK
from rlpipe.envs.sandbox.tree import scratch
from tests.helpers.cli import marked_processes, start
from tests.helpers.disturbed_runs import LONG

_MEMFD = "/memfd:"
_LISTENING = "0A"  # the state in /proc/net/tcp


class Held:
    """What processes hold now: sockets, memory without a name, entries of /dev/shm.

    Each is known by its inode or path, so that no other run's is taken for it.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        held = {one for pid in pids for one in _descriptors_and_maps(pid)}
        self.sockets = {name[8:-1] for name, _ in held if name.startswith("socket:[")}
        self.memfds = {inode for name, inode in held if name.startswith(_MEMFD)}
        self.entries = {Path(name) for name, _ in held if name.startswith("/dev/shm/")}

    def listening(self) -> list[str]:
        """Addresses, as the kernel writes them, at which one of the sockets listens."""
        rows = [
            row.split()
            for table in ("tcp", "tcp6")
            for row in Path("/proc/net", table).read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if row[3] == _LISTENING and row[9] in self.sockets]

    def holders(self) -> list[str]:
        """Processes that hold some of the memory, whosever they are."""
        return [
            f"{pid} holds {name}"
            for pid in psutil.pids()
            for name, inode in _descriptors_and_maps(pid)
            if name.startswith(_MEMFD) and inode in self.memfds
        ]

    def left(self) -> list[str]:
        """What of it is still there."""
        return self.listening() + self.holders() + [str(path) for path in self.entries if path.exists()]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _descriptors_and_maps(pid: int) -> Iterator[tuple[str, int]]:
    """(name, inode) of all that a process has open or mapped; nothing of one that ended."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink()), descriptor.stat().st_ino
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, inode, *name = line.split(maxsplit=5)
            yield "".join(name), int(inode)


class Run:
    """A run with what a worker leaves that is killed within a command: a folder and a control group."""

    def __init__(self, directory, *overrides, lines=1):
        # with W&B, whose service is one of the processes that must end
        self.process, self.marker = start(*LONG, "metrics.wandb=auto", *overrides, cwd=directory, lines=lines)
        self.family = set(marked_processes(self.marker))
        for process in list(self.family):  # those that write a title over their environment show no mark
            with suppress(psutil.Error):
                self.family |= set(process.children(recursive=True))
        self.pids = [process.pid for process in self.family]
        self.held = Held(self.pids)
        worker = self.processes("RolloutWorker")[0]
        name = f"rlpipe-sandbox-{worker.pid}-{worker.environ()[MARK]}-left"
        self.folder = scratch() / name
        self.folder.mkdir()
        self.group = cgroup.Group(name, cgroup.controllers(), memory=1 << 30, processes=99, cores=1.0)

    def processes(self, word):
        """Living ones whose command line has the word."""
        found = []
        for process in marked_processes(self.marker):
            with suppress(psutil.Error):  # it ended just now
                found += [process] if word in " ".join(process.cmdline()) else []
        return found

    def process_called(self, name):
        found = []
        for process in marked_processes(self.marker):
            with suppress(psutil.NoSuchProcess):  # commands of the sandbox end at any time
                found += [process] if process.name() == name else []
        (only,) = found
        return only

    def left(self):
        """Processes of the run, and what they held, its folders and groups."""
        folders = [*Path("/tmp").glob(f"rlpipe-ray-{self.process.pid}-*"), self.folder]
        folders += [path for pid in self.pids for path in scratch().glob(f"rlpipe-sandbox-{pid}-*")]
        return (
            [str(process) for process in {*self.family, *marked_processes(self.marker)} if _lives(process)]
            + self.held.left()
            + [str(path) for path in [*folders, *self.group.paths] if path.exists()]
        )

    def output(self):
        """What a run said that ends, once nothing of it is left."""
        output, _ = self.process.communicate(timeout=240)
        deadline = time.monotonic() + 60
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        return output
