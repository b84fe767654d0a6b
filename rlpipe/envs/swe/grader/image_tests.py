"""Runs the tests of an image inside a container, as old as Python 3.6 there; see `images` for the host.

    host --stdin: key, ids, this text--> supervise: imports nothing of the repository, cannot be traced
                                            | stdin: token, ids      ^ pipe: token, passed ids
                                         play: pytest, the tests, the code under test

The report is signed with the key, which `play` never sees. The token and pytest's own objects are in the
process that imports the code under test: code that looks for them in its memory can cheat.
"""

import ctypes
import hashlib
import hmac
import json
import os
import subprocess
import sys
from pathlib import Path

_LONGEST_REPORT = 16 << 20
_PR_SET_DUMPABLE = 4


def supervise():
    """Run `play` in a child and print what it reported and how it ended, signed."""
    order = json.load(sys.stdin)
    # without this the child could read our memory and descriptors through /proc
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    token = os.urandom(16).hex()
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", order["program"], str(write), *sys.argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if order["probe"] else subprocess.DEVNULL,
        pass_fds=[write],
    )
    os.close(write)
    child.stdin.write(json.dumps({"token": token, "tests": order["tests"]}).encode())
    child.stdin.close()
    with os.fdopen(read, "rb") as pipe:
        line = pipe.readline(_LONGEST_REPORT).decode(errors="replace")
    passed = json.loads(line[len(token) :]) if line.startswith(token) else None
    text = json.dumps({"passed": passed, "exit_code": child.wait()})
    print("\n" + hmac.new(order["key"].encode(), text.encode(), hashlib.sha256).hexdigest() + text)


def play():
    """Run pytest over the tests, if any, and report those that passed once it has ended."""
    order = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest`, but after pytest was imported
    outcomes = _Outcomes()
    options = ["-p", "no:cacheprovider", *sys.argv[2:]]
    code = int(pytest.main([*options, *order["tests"]], plugins=[outcomes])) if order["tests"] else 0
    with os.fdopen(int(sys.argv[1]), "wb") as pipe:
        passed = sorted(outcomes.passed - outcomes.failed)
        pipe.write((order["token"] + json.dumps(passed) + "\n").encode())
    os._exit(code)  # what the code under test left for the interpreter's end does not count


class _Outcomes:
    """A pytest plugin. A test passed when its call did and no phase failed, was skipped or xfailed."""

    def __init__(self):
        self.passed, self.failed = set(), set()

    def pytest_configure(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        name = self._config.cwd_relative_nodeid(report.nodeid)
        if report.outcome in ("failed", "skipped") or hasattr(report, "wasxfail"):
            self.failed.add(name)
        elif report.when == "call" and report.outcome == "passed":
            self.passed.add(name)
