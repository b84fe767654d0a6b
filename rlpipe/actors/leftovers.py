"""Removes the processes and files that a run leaves when it is killed.

    with watched_over():  # starts one more process, in a separate session
        ...

It handles only leftovers without another owner: a worker ends its sandboxes, `rollout/sglang/guard.py` ends a
server after the death of its worker, and `RaySession` ends Ray. Flow: the driver puts a mark into its
environment, which its child processes inherit. The watching process waits until the driver has ended for any
reason. It then kills all processes with the mark, and removes the folders, control groups and containers of
dead rlpipe processes. Processes of other runs are not affected.
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
from rlpipe.actors.ray_session import remove_leftovers as remove_folders
from rlpipe.envs.sandbox.leftovers import MARK, leftovers
from rlpipe.envs.sandbox.leftovers import remove_leftovers as remove_sandboxes
from rlpipe.rollout.shared_entries import remove_leftovers as remove_servers


@contextmanager
def watched_over(containers: bool = False) -> Iterator[None]:
    """End every process that is started within the context, when the context or this process ends.

    containers: also remove containers that were started within it.
    """
    os.environ[MARK] = mark = uuid.uuid4().hex

    # The watcher ignores signals from the terminal and has no mark, so it outlives the driver.
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
    """Return the living processes with the mark in their environment, and their descendants.

    Descendants are included, because Ray's agents and SGLang's schedulers overwrite their environment with a
    title.
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
    """Kill all processes with the mark, then remove the files of dead processes."""
    deadline = time.monotonic() + PATIENCE_S
    kill_all(lambda: marked(mark))

    remove_folders()
    remove_servers()
    remove_sandboxes(mark)

    # A control group cannot be removed while a process in it is still ending.
    while leftovers(mark) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        remove_sandboxes(mark)

    if containers:
        from rlpipe.envs.sandbox.container import remove_leftovers as remove_containers

        remove_containers()


def main() -> None:
    """Wait for the end of process argv[1], then `clean_up(argv[2], argv[3])`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    with suppress(ProcessLookupError):
        driver = os.pidfd_open(int(sys.argv[1]))
        # If the parent is another process, the driver has ended and its id may have been reused.
        if os.getppid() == int(sys.argv[1]):
            select.select([driver], [], [])

    clean_up(sys.argv[2], sys.argv[3] == "True")


if __name__ == "__main__":
    main()
