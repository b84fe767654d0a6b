"""What a run leaves when its processes are killed, and the process that ends and removes it.

    with watched_over():  # one process beside the run, in a session of its own
        ...

Owns no life of a part that still has an owner: a worker ends its sandboxes, `rollout/sglang/guard.py` a
server whose worker is gone, `RaySession` Ray. Flow: the driver marks its environment, which all that it
starts inherits; the process here waits until the driver has ended, however that was, kills what carries the
mark, and removes what dead processes of ours left: folders, control groups, containers. The living of other
runs are spared.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from rlpipe.actors.ray_session import LOOK_S, PATIENCE_S, kill_all, module_path
from rlpipe.actors.ray_session import sweep as sweep_folders
from rlpipe.envs.sandbox.sweep import MARK, left
from rlpipe.envs.sandbox.sweep import sweep as sweep_sandboxes
from rlpipe.rollout.shared_entries import sweep as sweep_servers


@contextmanager
def watched_over(containers: bool = False) -> Iterator[None]:
    """Let nothing of the block survive it, nor this process. containers: they are swept as well."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    watcher = subprocess.Popen(
        [sys.executable, "-m", "rlpipe.actors.leftovers", str(os.getpid()), mark, str(containers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": module_path(), MARK: ""},
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        del os.environ[MARK]
        clean_up(mark, containers)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes whose environment carries the mark, and their descendants.

    Ray's agents and SGLang's schedulers write their titles over their environment.
    """
    family: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                family |= {process, *process.children(recursive=True)}
    return [process for process in family if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def clean_up(mark: str, containers: bool) -> None:
    """Kill all that carries the mark, then remove what the dead left behind."""
    deadline = time.monotonic() + PATIENCE_S
    kill_all(lambda: marked(mark))
    sweep_folders()
    sweep_servers()
    sweep_sandboxes(mark)
    while left(mark) and time.monotonic() < deadline:  # a process in them was still dying
        time.sleep(LOOK_S)
        sweep_sandboxes(mark)
    if containers:
        from rlpipe.envs.sandbox.container import sweep as sweep_containers

        sweep_containers()


def main() -> None:
    """Wait for the end of process argv[1], then `clean_up(argv[2], argv[3])`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        driver = os.pidfd_open(int(sys.argv[1]))
        if os.getppid() == int(sys.argv[1]):  # else it is gone, and the number another's
            select.select([driver], [], [])
    clean_up(sys.argv[2], sys.argv[3] == "True")


if __name__ == "__main__":
    main()
