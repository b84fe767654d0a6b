"""Grades the diff of a repository that is stored in a container image, in a new container of that image.

Owns the choice of changes to apply (none that configure or replace the tests) and the checks of a report. A
report counts only if `image_tests.supervise` signed it, if pytest ended with status 0, and if it names every
required test. Here, tests and code share a process. This mode is less secure than `trees`, so a `Grade` is
marked `in_process`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import shlex
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox.base import CommandResult
from rlpipe.envs.swe.instances import Instance

if TYPE_CHECKING:
    from rlpipe.envs.sandbox.container import DockerSandbox, SingularitySandbox
    from rlpipe.envs.swe.checkout import CheckoutSandbox

_CONFIGURATION = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
)
_START_HOOKS = ("sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.egg-info/*", "*.dist-info/*")
_RUNNER = ("pytest.py", "pytest/*", "_pytest/*", "pluggy.py", "pluggy/*")  # PYTHONPATH may include the root
_TEST_FOLDERS = {"test", "tests", "testing"}
_MOVES = re.compile(rb"^(rename|copy) ", re.MULTILINE)
_SIGNATURE = 64


def paths_of_tests(instance: Instance) -> list[str]:
    """Return path patterns of the instance's tests: their files, and the `tests` folders that contain them.

    >>> names = ("a/tests/b/test_c.py::d", "test_e.py::f")
    >>> paths_of_tests(Instance(instance_id="i", problem_statement="", fail_to_pass=names))
    ['a/tests', 'a/tests/*', 'a/tests/b/test_c.py', 'test_e.py']
    """
    patterns = set()
    for file in {*instance.patched_tests, *(test.partition("::")[0] for test in instance.tests)}:
        patterns.add(file)
        folders = [f for f in reversed(PurePosixPath(file).parents) if f.name in _TEST_FOLDERS]
        patterns |= {str(folders[0]), f"{folders[0]}/*"} if folders else set()
    return sorted(patterns)


def apply_command(instance: Instance) -> str:
    """Return a command that applies a patch from stdin, except changes to tests, test settings and hooks."""
    names = (*_CONFIGURATION, *_START_HOOKS)
    patterns = [*names, *(f"*/{name}" for name in names), *_RUNNER, *paths_of_tests(instance)]
    return shlex.join(["git", "apply", *(f"--exclude={pattern}" for pattern in patterns), "-"])


def passed_tests(
    fresh: DockerSandbox | SingularitySandbox | CheckoutSandbox,
    instance: Instance,
    patch: bytes,
    config: EnvConfig,
) -> int:
    """Apply a patch in a new container; return the number of required tests that pass there.

    Raises InfrastructureError if the container fails, lacks pytest, or cannot apply `test_patch`.
    """
    probe, key = _run(fresh, config, (), kind="ids", probe=True)
    if reported(probe, key) != ([], 0):
        raise InfrastructureError(
            f"env.test_command={config.test_command!r} cannot import pytest in the image of "
            f"{instance.instance_id}: {probe.output.strip()[-300:]!r}"
        )

    if _MOVES.search(patch) or fresh.run(apply_command(instance), stdin=patch).exit_code:
        return 0  # rlpipe's diffs have no renames; --exclude would not protect their source

    if instance.test_patch:
        tests = fresh.run("git apply -", stdin=instance.test_patch.encode())
        if tests.exit_code:
            raise InfrastructureError(f"test_patch does not apply: {tests.output[-300:]!r}")

    # A run with another exit status may have skipped checks, so at least one test counts as failed. If the
    # kind is not "ids", tests that are not required may fail, so status 1 is normal.
    kind, tests = what_to_run(instance)
    result, key = _run(fresh, config, tests, kind=kind)
    names, exit_code = reported(result, key)
    passed = len(set(instance.tests) & set(names))
    ended_well = exit_code == 0 or (kind != "ids" and exit_code == 1)
    return passed if ended_well else min(passed, len(instance.tests) - 1)


def what_to_run(instance: Instance) -> tuple[str, tuple[str, ...]]:
    """Return (kind, arguments) of the test run of an instance.

    Kind "ids": pytest runs the listed ids. Kind "files": pytest runs the files of `test_patch`, as SWE-bench
    does, because the list has function names (sympy) or names that end at a space. Kind "django": Django's
    test runner runs the modules of these files.

    >>> patch = "+++ b/tests/a/tests.py"
    >>> def of(test, repo=""):
    ...     one = Instance(
    ...         instance_id="i", problem_statement="", repo=repo, fail_to_pass=(test,), test_patch=patch
    ...     )
    ...     return what_to_run(one)
    >>> of("tests/a/tests.py::test_b"), of("test_b"), of("test_b (a.tests.T)", "django/django")
    (('ids', ('tests/a/tests.py::test_b',)), ('files', ('tests/a/tests.py',)), ('django', ('a.tests',)))
    """
    files = tuple(file for file in instance.patched_tests if file.endswith(".py"))
    if instance.repo == "django/django":
        parts = (file.removesuffix(".py").removeprefix("tests/") for file in files)
        return "django", tuple(part.replace("/", ".") for part in parts)
    if files and any("::" not in test or test.count("[") != test.count("]") for test in instance.tests):
        return "files", files
    return "ids", instance.tests


def _run(
    fresh: DockerSandbox | SingularitySandbox | CheckoutSandbox,
    config: EnvConfig,
    tests: tuple[str, ...],
    *,
    kind: str,
    probe: bool = False,
) -> tuple[CommandResult, str]:
    """Run the tests of an image; return the result and the key that signs its report."""
    source, key = _source(), secrets.token_hex(32)
    # The child must not import files in the repository's root before it imports pytest.
    child = f"import sys; sys.path[:] = [p for p in sys.path if p]\n{source}\nplay()"
    order = {"key": key, "tests": tests, "kind": kind, "program": child, "probe": probe}
    runner = shlex.join(["-I", "-S", "-c", f"{source}\nsupervise()"])
    command = config.test_command.replace("{runner}", runner)
    result = fresh.run(
        command,
        timeout_s=config.test_timeout_s,
        stdin=json.dumps(order).encode(),
        output_kb=config.sandbox.tree_mb << 10,  # thousands of names exceed the normal limit of output
    )
    return result, key


@cache
def _source() -> str:
    return Path(__file__).with_name("image_tests.py").read_text()


def reported(result: CommandResult, key: str) -> tuple[list[str], int]:
    """Return (passed tests, pytest's exit status) of the signed report; ([], 1) without a valid report."""
    for line in () if result.exceeded else result.output.splitlines():
        signature, text = line[:_SIGNATURE], line[_SIGNATURE:].encode()
        if not hmac.compare_digest(signature.encode(), _signature(key, text)):
            continue

        match json.loads(text):
            case {"passed": list(passed), "exit_code": int(code)} if all(type(t) is str for t in passed):
                return passed, code
    return [], 1


def _signature(key: str, text: bytes) -> bytes:
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest().encode()
