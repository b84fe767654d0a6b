"""Processes of tests that start in a moment: forked from a server that has imported what they need.

The server has no threads. A test's own process has, of Ray, gRPC and autograd, with objects that belong to
them, and a process forked from it may crash.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ray import cloudpickle

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.helpers.preloaded"])


def in_a_process(work: Callable[[], None], *, kill_after: float | None = None) -> int:
    """Exit status of `work` in a process of its own: -9 when it was killed after so many seconds.

    It sees copies of what `work` refers to, and the environment and folder of this process.
    """
    child = SERVER.Process(
        target=_play, args=(cloudpickle.dumps(work), dict(os.environ), str(Path.cwd()), kill_after)
    )
    child.start()
    child.join(300)
    if child.exitcode is None:
        child.kill()
        raise TimeoutError("the process hangs")
    return child.exitcode


def _play(work: bytes, environment: dict[str, str], folder: str, kill_after: float | None) -> None:
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        played = cloudpickle.loads(work)
        if kill_after is not None:
            threading.Thread(target=_kill_me, args=(kill_after,), daemon=True).start()
        played()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _kill_me(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
