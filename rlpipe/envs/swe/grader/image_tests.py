"""Runs the tests of an image inside its container, with Python 3.6 or newer; see `images` for the host.

    host --stdin: key, ids, this text--> supervise: imports nothing of the repository, cannot be traced
                                            | stdin: token, ids      ^ pipe: token, passed ids
                                         play: pytest, the tests, the code under test

The report is signed with the key, which `play` never gets. The token and pytest's objects are in the process
that imports the code under test: code that searches the memory of that process for them can cheat.
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
_NO_SUCCESS = ("addError", "addFailure", "addSkip", "addExpectedFailure", "addUnexpectedSuccess")


def supervise():
    """Run `play` in a child process; print its report and exit status, signed."""
    order = json.load(sys.stdin)
    # Without this, the child could read this process's memory and descriptors through /proc.
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
    child.stdin.write(json.dumps({"token": token, "tests": order["tests"], "kind": order["kind"]}).encode())
    child.stdin.close()
    with os.fdopen(read, "rb") as pipe:
        line = pipe.readline(_LONGEST_REPORT).decode(errors="replace")
    passed = json.loads(line[len(token) :]) if line.startswith(token) else None
    text = json.dumps({"passed": passed, "exit_code": child.wait()})
    print("\n" + hmac.new(order["key"].encode(), text.encode(), hashlib.sha256).hexdigest() + text)


def play():
    """Run the tests, if any, and then report the passed ones."""
    order, report = json.load(sys.stdin), int(sys.argv[1])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    outcomes = _Outcomes(order["kind"])
    code = outcomes.run_django(order["tests"]) if order["kind"] == "django" else outcomes.run(order["tests"])
    with os.fdopen(report, "wb") as pipe:
        passed = sorted(outcomes.names(outcomes.passed) - outcomes.names(outcomes.failed))
        pipe.write((order["token"] + json.dumps(passed) + "\n").encode())
    os._exit(code)  # skip exit handlers of the code under test


class _Outcomes:
    """A pytest plugin and unittest hooks that record outcomes. A failed or skipped part fails its test."""

    def __init__(self, kind):
        self.passed, self.failed, self._kind = set(), set(), kind

    def run(self, tests):
        """Run pytest on ids or files; return its exit status."""
        import pytest

        sys.path.insert(0, str(Path.cwd()))  # like `python -m pytest`, but after importing pytest
        options = ["-p", "no:cacheprovider", *sys.argv[2:]]
        return int(pytest.main([*options, *tests], plugins=[self])) if tests else 0

    def run_django(self, labels):
        """Run Django's test runner on labels; return its exit status."""
        import runpy
        import unittest

        # This also covers subclasses of TestResult, because they call its methods.
        result = unittest.TestResult
        noting: dict[str, object] = {
            name: _noting(getattr(result, name), self.failed) for name in _NO_SUCCESS
        }
        noting["addSuccess"] = _noting(result.addSuccess, self.passed)
        noting["addSubTest"] = _noting_subtests(result.addSubTest, self.failed)
        for name, method in noting.items():
            setattr(result, name, method)

        runner = Path.cwd() / "tests" / "runtests.py"
        sys.argv = [str(runner), "--verbosity", "2", "--settings=test_sqlite", "--parallel", "1", *labels]
        try:
            runpy.run_path(str(runner), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def names(self, tests):
        """Return the tests' ids and the other names that a list of required tests may use for them.

        A list of kind `files` was extracted from printed lines: a name may end at its first space, or be only
        the function's name.
        """
        if self._kind != "files":
            return tests
        return tests | {n.split(" ")[0] for n in tests} | {n.rpartition("::")[2] for n in tests}

    def pytest_configure(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        name = self._config.cwd_relative_nodeid(report.nodeid)
        if report.outcome in ("failed", "skipped") or hasattr(report, "wasxfail"):
            self.failed.add(name)
        elif report.when == "call" and report.outcome == "passed":
            self.passed.add(name)


def _noting(method, into):
    """Wrap a method of TestResult so that it also records the test's names: its id and its docstring."""

    def noting(self, test, *details):
        name = getattr(test, "_testMethodName", "")
        cls = type(test)
        into.add(f"{name} ({cls.__module__}.{cls.__qualname__})" if name else str(test))
        if test.shortDescription():
            into.add(test.shortDescription())
        return method(self, test, *details)

    return noting


def _noting_subtests(method, failed):
    """Wrap `TestResult.addSubTest` so that a failed subtest counts as a failure of its test."""
    note = _noting(lambda self, test, *details: None, failed)

    def noting(self, test, subtest, error):
        if error is not None:
            note(self, test)
        return method(self, test, subtest, error)

    return noting
