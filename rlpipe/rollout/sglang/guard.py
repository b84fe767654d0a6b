"""Runs a command, and ends it with all its child processes when standard input closes.

    python guard.py COMMAND [ARGUMENTS...]

The process that starts a server has the other end of this pipe. However that process ends, even by kill -9,
the pipe closes, so no server is left behind. The command runs in this process's group, which the starting
process created. The kernel kills the command when this process is killed. (Ray kills a dead worker's children
before they can read a pipe.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command and return its exit status; does not return if standard input closes first."""
    # the command handles SIGTERM itself, and ends its children; unlike SIG_IGN, a handler is not inherited
    signal.signal(signal.SIGTERM, lambda *_: None)
    prctl = ctypes.CDLL(None).prctl
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, because its lock would still be held at exit
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
