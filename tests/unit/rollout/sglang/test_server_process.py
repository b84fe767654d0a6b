"""A server process ends with everything it started: when stopped, when it hangs, when we are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlpipe.rollout.sglang.server import ServerProcess

pytestmark = pytest.mark.unit

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY


def start(code, log):
    return ServerProcess([sys.executable, "-c", code], os.environ, log)


def child_of(log):
    """The pid the server printed."""
    deadline = time.monotonic() + 60
    while "child" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(log.read_text().split()[1])


def gone(pid):
    """Whether a process ends within seconds; one that is not yet reaped counts as ended."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_stopping_ends_the_whole_group(tmp_path):
    server = start(FAMILY, tmp_path / "log")
    child = child_of(tmp_path / "log")
    assert server.is_running()
    server.stop()
    assert not server.is_running() and gone(child)


def test_a_server_deaf_to_sigterm_is_killed(tmp_path):
    server = start(DEAF, tmp_path / "log")
    child = child_of(tmp_path / "log")
    server.stop()
    assert gone(child) and gone(server.pid)


def test_nothing_is_left_when_we_are_killed(tmp_path):
    log = tmp_path / "log"
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from rlpipe.rollout.sglang.server import ServerProcess\n"
        f"server = ServerProcess([sys.executable, '-c', {FAMILY!r}], os.environ, Path({str(log)!r}))\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    guard, child = int(owner.stdout.readline()), child_of(log)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(child) and gone(guard)


def test_no_server_is_left_when_its_guard_is_killed(tmp_path):
    """Ray kills a dead worker's children: the guard, before it reads that its pipe closed."""
    server = start(
        "import os, time; print('child', os.getpid(), flush=True); time.sleep(600)", tmp_path / "log"
    )
    child = child_of(tmp_path / "log")
    os.kill(server.pid, signal.SIGKILL)
    assert gone(child)
    server.stop()


async def _never():
    return False


def test_a_server_that_ends_while_starting_shows_its_log(tmp_path):
    server = start("print('no such model'); raise SystemExit(3)", tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"ended while starting[\s\S]*no such model"):
        asyncio.run(server.wait_until(_never, timeout=20))
    server.stop()


def test_a_server_that_does_not_answer_in_time_is_an_error(tmp_path):
    server = start("import time; time.sleep(60)", tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"start_timeout=0\.3 s"):
        asyncio.run(server.wait_until(_never, timeout=0.3))
    server.stop()
