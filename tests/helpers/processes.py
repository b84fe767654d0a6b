"""Processes of tests that start in a moment: forked from a server that has imported what they need.

The server has no threads. A test's own process has, of Ray, gRPC and autograd, with objects that belong to
them, and a process forked from it may crash.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


def run_command(
    words: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """`rlpipe` with words, run to its end, without the seconds that its imports take.

    Not for a run with Ray: a process that is forked has imported it before the run could give it a token.
    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        told = list(words), dict(environment), str(cwd), list(map(str, outputs))
        child = SERVER.Process(target=_command, args=told)
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(told[0], timeout, *(file.read_bytes() for file in outputs))
        return subprocess.CompletedProcess(told[0], child.exitcode, *(file.read_text() for file in outputs))


class Started:
    """A command that runs. output: what it has written so far; pid, exitcode, join: of its process."""

    def __init__(self, child, outputs):
        self._child, self._outputs, self.pid = child, outputs, child.pid

    @property
    def exitcode(self):
        child = self._child
        return child.poll() if isinstance(child, subprocess.Popen) else child.exitcode

    def join(self, timeout):
        if not isinstance(self._child, subprocess.Popen):
            self._child.join(timeout)
            return
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)

    def output(self):
        return "".join(file.read_text() for file in self._outputs if file.exists())


@contextmanager
def started_command(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], fresh: bool = False
) -> Iterator[Started]:
    """`rlpipe run` with arguments, started as by `run_command`; killed at the end of the block.

    fresh: in a new interpreter.
    """
    outputs = [cwd / name for name in ("stdout", "stderr")]
    if fresh:
        with outputs[0].open("w") as output:
            words = [sys.executable, "-m", "rlpipe.run", *arguments]
            child = subprocess.Popen(
                words, cwd=cwd, env=dict(environment), stdout=output, stderr=output, start_new_session=True
            )
    else:
        told = ["run", *arguments], dict(environment), str(cwd), list(map(str, outputs))
        child = SERVER.Process(target=_command, args=told)
        child.start()
    started = Started(child, outputs)
    try:
        yield started
    finally:
        child.kill()
        started.join(60)


def _command(words: list[str], environment: dict[str, str], folder: str, outputs: list[str]) -> None:
    """Be the interpreter: its streams, its environment, its end."""
    for number, path in enumerate((os.devnull, *outputs)):
        flags = os.O_CREAT | os.O_WRONLY if number else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from rlpipe.cli.main import main

    # As `python -m` does, and as `rlpipe` makes of it: the current folder, behind installed packages.
    sys.argv = ["rlpipe", *words]
    sys.path.append(folder)
    status: object = 1
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


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
