"""A process that is killed leaves nothing: what it started and made is ended by the one beside it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlpipe.actors.leftovers import MARK, marked, watched_over
from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.tree import scratch
from tests.helpers.cli import environment

pytestmark = pytest.mark.chaos
HANG_S = 60.0
DRIVER = """
import json, os, subprocess, sys, time
from rlpipe.actors.leftovers import MARK, watched_over
from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.leftovers import prefix
from rlpipe.envs.sandbox.tree import scratch

SERVER = '''
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(1000)
'''
with watched_over():
    name = f"{prefix()}left"
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    port = int(server.stdout.readline())
    folder = scratch() / name
    (folder / "work").mkdir(parents=True)
    group = cgroup.Group(name, cgroup.controllers(), memory=1 << 30, processes=99, cores=1.0)
    inside = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    group.add(inside.pid)
    inside.stdout.readline()
    told = {"port": port, "mark": os.environ[MARK], "paths": [str(folder), *map(str, group.paths)]}
    print(json.dumps(told), flush=True)
    if sys.argv[1] == "os._exit":
        os._exit(3)
    if sys.argv[1] == "stay":
        time.sleep(1000)
"""


def driver(how):
    """A process that watches over a server, a folder and a group of its own, and what it said of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return process, json.loads(process.stdout.readline())


def until(condition, what):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM to the group", "os._exit"])
def test_whatever_ends_a_process_nothing_that_it_started_or_made_is_left(how):
    other, living = driver("stay")
    process, told = driver(how if how == "os._exit" else "stay")
    try:
        if how == "kill -9":
            process.kill()
        elif how == "SIGTERM to the group":
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(HANG_S)
        until(lambda: not marked(told["mark"]), lambda: marked(told["mark"]))
        until(lambda: not any(map(os.path.exists, told["paths"])), lambda: told["paths"])
        assert not is_listening(told["port"])
        assert is_listening(living["port"]) and len(marked(living["mark"])) == 2, "another run goes on"
        assert all(map(os.path.exists, living["paths"]))
    finally:
        for one in (process, other):
            one.kill()
            one.communicate()
    until(lambda: not marked(living["mark"]), lambda: marked(living["mark"]))
    until(lambda: not any(map(os.path.exists, living["paths"])), lambda: living["paths"])


def test_an_orderly_end_leaves_nothing_and_no_watcher():
    before = {child.pid for child in psutil.Process().children()}
    with watched_over():
        (watcher,) = [child for child in psutil.Process().children() if child.pid not in before]
        # Between fork and exec a process has no command line.
        end = time.monotonic() + HANG_S
        while not watcher.cmdline() and time.monotonic() < end:
            time.sleep(0.01)
        assert "rlpipe.actors.leftovers" in watcher.cmdline()
        assert os.getsid(watcher.pid) == watcher.pid, "a signal to our group spares it"
        left = subprocess.Popen(["sleep", "1000"])
        assert marked(os.environ[MARK])[0].pid == left.pid
    assert not psutil.pid_exists(left.pid) and not watcher.is_running() and MARK not in os.environ


def test_a_watcher_that_starts_after_the_end_of_its_process_cleans_up_at_once(tmp_path):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    folder = scratch() / f"rlpipe-sandbox-{dead.pid}-late"
    folder.mkdir()
    left = subprocess.Popen(["sleep", "1000"], env=environment(**{MARK: "f" * 32}))
    command = [sys.executable, "-m", "rlpipe.actors.leftovers", str(dead.pid), "f" * 32, "False"]
    assert (
        subprocess.run(command, env=environment(), cwd=tmp_path, timeout=HANG_S, check=False).returncode == 0
    )
    assert left.wait(HANG_S) == -signal.SIGKILL and not Path(folder).exists()
    assert not list(cgroup.groups(f"rlpipe-sandbox-{dead.pid}-"))
