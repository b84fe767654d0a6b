"""Grades a tree of files: the tests in one sandbox, the code under test in another, a socket between them.

    host --stdin: nonce, ids--> sandbox of the tests (isolated_tests, proxy; the instance's tests, data files)
                                        | socket pair: codec
                                sandbox of the code (code_server; the model's tree without any test)

Owns both sandboxes and what each sees. They share no namespace, no file and no descriptor but the socket, so
that the code reaches neither tests, ids, nonce nor the report. An instance with `graded_in_process` has one
sandbox for both.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from threading import Event

from rlpipe.envs.sandbox.base import CommandResult
from rlpipe.envs.sandbox.bubblewrap import WORK, execute
from rlpipe.envs.sandbox.local import TreeRunner
from rlpipe.envs.sandbox.tree import EmptyDirectory, Entry, File, Tree, tree_of
from rlpipe.envs.swe.instances import Instance

_START_HOOKS = {"sitecustomize", "usercustomize"}
_BINARY_MODULES = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_TESTS = ("codec", "proxy", "isolated_tests")
_CODE = ("codec", "code_server")


def code_to_grade(instance: Instance, final: Tree) -> dict[str, Entry]:
    """The model's files, without tests and what shadows a module."""
    tests = _tests(instance)
    return {
        path: entry
        for path, entry in final.items()
        if not isinstance(entry, EmptyDirectory)
        and (path in instance.files or not _shadows(path))
        and not instance.owns_test(path)
        and not any(PurePosixPath(test).is_relative_to(path) for test in tests)
    }


def _tests(instance: Instance) -> dict[str, str]:
    return {path: text for path, text in instance.files.items() if instance.owns_test(path)}


def _shadows(path: str) -> bool:
    """Whether a path would be imported in place of the standard library, or is no source at all."""
    name = PurePosixPath(path).parts[0].split(".")[0]
    return name in sys.stdlib_module_names or name in _START_HOOKS or path.endswith(_BINARY_MODULES)


def modules_of(code: Tree) -> dict[str, str | None]:
    """Dotted names of the modules in a tree; the folder in which a package's parts are, None for others.

    >>> modules_of(tree_of({"core.py": "", "pkg/__init__.py": "", "pkg/a.py": "", "notes.txt": ""}))
    {'core': None, 'pkg': '/work/pkg', 'pkg.a': None}
    """
    modules: dict[str, str | None] = {}
    for path in (PurePosixPath(name) for name in sorted(code) if name.endswith(".py")):
        if path.name == "__init__.py" and len(path.parts) > 1:
            modules[".".join(path.parts[:-1])] = f"{WORK}/{path.parent}"
        else:
            modules[".".join(path.with_suffix("").parts)] = None
            for parent in list(path.parents)[:-1]:
                modules.setdefault(".".join(parent.parts), f"{WORK}/{parent}")
    return modules


def run_tests(runner: TreeRunner, instance: Instance, code: Tree, timeout_s: float) -> int:
    """How many of the instance's tests pass over this code; 0 when there is no well-formed report.

    Raises InfrastructureError when a sandbox failed.
    """
    nonce, tests = secrets.token_hex(16), tree_of(_tests(instance))
    order = {"nonce": nonce, "tests": instance.tests, "modules": modules_of(code)}
    stdin = json.dumps(order).encode()
    if instance.graded_in_process:
        command = _command(_TESTS, "isolated_tests.main()")
        result, _ = execute(runner.config, code | tests, command, timeout_s=timeout_s, stdin=stdin)
        return passed_tests(result, nonce, instance.tests)
    data = {p: e for p, e in code.items() if isinstance(e, File) and not p.endswith((".py", ".pth"))}
    ours, theirs = socket.socketpair()
    over = Event()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        served = threads.submit(_serve, runner, code, theirs, timeout_s, over)
        try:
            command = _command(_TESTS, "isolated_tests.main()", ours.fileno())
            result, _ = execute(
                runner.config,
                data | tests,
                command,
                timeout_s=timeout_s,
                stdin=stdin,
                pass_fds=[ours.fileno()],
            )
        finally:
            over.set()
            ours.close()  # an honest server ends at once
        served.result()
    return passed_tests(result, nonce, instance.tests)


def _serve(runner: TreeRunner, code: Tree, end: socket.socket, timeout_s: float, over: Event) -> None:
    """Run the code server until the tests are over. Raises InfrastructureError."""
    command = _command(_CODE, f"code_server.serve({end.fileno()})")
    try:
        execute(runner.config, code, command, timeout_s=timeout_s, pass_fds=[end.fileno()], stop=over.is_set)
    finally:
        end.close()


def passed_tests(result: CommandResult, nonce: str, tests: tuple[str, ...]) -> int:
    """How many of the tests a report names; 0 when it is missing, malformed, or the run ended badly.

    >>> passed_tests(CommandResult(output='n {"passed": ["a"], "intact": true}', exit_code=0), "n", ("a",))
    1
    >>> passed_tests(CommandResult(output="n {}", exit_code=0), "n", ("a",))
    0
    """
    lines = [line for line in result.output.splitlines() if line.startswith(nonce)]
    if result.exit_code or result.exceeded or len(lines) != 1:
        return 0
    try:
        report = json.loads(lines[0].removeprefix(nonce))
    except (ValueError, RecursionError):
        return 0
    match report:
        case {"passed": list(passed), "intact": True} if all(type(test) is str for test in passed):
            return len(set(tests) & set(passed))
    return 0


@cache
def _program(names: tuple[str, ...], call: str) -> str:
    """Source that makes modules of this package out of their texts, as no sandbox has them."""
    package = __package__
    lines = ["import sys, types"]
    parts = package.split(".")
    for name in [".".join(parts[: n + 1]) for n in range(len(parts))]:
        lines.append(f"sys.modules[{name!r}] = types.ModuleType({name!r})")
    for name in names:
        text = Path(__file__).with_name(f"{name}.py").read_text()
        lines.append(f"{name} = sys.modules['{package}.{name}'] = types.ModuleType('{package}.{name}')")
        lines.append(f"sys.modules[{package!r}].{name} = {name}")
        lines.append(f"exec({text!r}, {name}.__dict__)")
    return "\n".join([*lines, call])


def _command(names: tuple[str, ...], call: str, *arguments: int) -> str:
    words = ["python3", "-I", "-B", "-c", _program(names, call), *map(str, arguments)]
    return "exec " + shlex.join(words)
