"""Grades a tree of files: the tests in one sandbox, the code under test in another, a socket between them.

    host --stdin: nonce, ids--> sandbox of the tests (isolated_tests, proxy; the instance's tests, data files)
                                        | socket pair: codec
                                sandbox of the code (code_server; the model's tree without any test)

Owns both sandboxes and the files of each. They share only the socket: no namespace, no file and no other
descriptor. So the code cannot reach the tests, their ids, the nonce or the report. An instance with
`graded_in_process` has one sandbox for tests and code.
"""

from __future__ import annotations

import json
import marshal
import secrets
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from importlib.util import MAGIC_NUMBER
from pathlib import Path, PurePosixPath
from threading import Event

from rlpipe.envs.sandbox.base import CommandResult
from rlpipe.envs.sandbox.bubblewrap import WORK, execute
from rlpipe.envs.sandbox.local import TreeRunner
from rlpipe.envs.sandbox.tree import EmptyDirectory, Entry, File, Tree, tree_of
from rlpipe.envs.swe.instances import Instance

_START_HOOKS = {"sitecustomize", "usercustomize"}
_BINARY_MODULES = (*BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_TESTS = ("late", "codec", "proxy", "isolated_tests")
_CODE = ("late", "codec", "code_server")


def code_to_grade(instance: Instance, final: Tree) -> dict[str, Entry]:
    """Return the model's files, without tests and without files that shadow a module."""
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
    """Return whether a file would replace a module of the standard library on import, or is compiled code."""
    name = PurePosixPath(path).parts[0].split(".")[0]
    return name in sys.stdlib_module_names or name in _START_HOOKS or path.endswith(_BINARY_MODULES)


def modules_of(code: Tree) -> dict[str, str | None]:
    """Return the modules in a tree: dotted name -> folder of a package, or None for a plain module.

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
    """Count the instance's tests that pass with this code; 0 if there is no valid report.

    Raises InfrastructureError if a sandbox fails.
    """
    nonce, tests = secrets.token_hex(16), tree_of(_tests(instance))
    order = {"nonce": nonce, "tests": instance.tests, "modules": modules_of(code)}
    stdin = _program(_TESTS) + marshal.dumps(order)
    if instance.graded_in_process:
        result, _ = execute(runner.config, code | tests, _command(), timeout_s=timeout_s, stdin=stdin)
        return passed_tests(result, nonce, instance.tests)

    # Data files go to both sandboxes; the code goes only to the sandbox of the code.
    data = {p: e for p, e in code.items() if isinstance(e, File) and not p.endswith((".py", ".pth"))}
    tests_end, code_end = socket.socketpair()
    over = Event()

    with tests_end, code_end, ThreadPoolExecutor(1) as threads:
        served = threads.submit(_serve, runner, code, code_end, timeout_s, over)
        try:
            options = {"timeout_s": timeout_s, "stdin": stdin, "pass_fds": [tests_end.fileno()]}
            result, _ = execute(runner.config, data | tests, _command(tests_end.fileno()), **options)
        finally:
            over.set()
            tests_end.close()  # the server ends when the socket closes
        served.result()
    return passed_tests(result, nonce, instance.tests)


def _serve(runner: TreeRunner, code: Tree, end: socket.socket, timeout_s: float, over: Event) -> None:
    """Run the code server until the tests have ended. Raises InfrastructureError if the sandbox fails."""
    options = {"stdin": _program(_CODE), "pass_fds": [end.fileno()], "stop": over.is_set}
    try:
        execute(runner.config, code, _command(end.fileno()), timeout_s=timeout_s, **options)
    finally:
        end.close()


def passed_tests(result: CommandResult, nonce: str, tests: tuple[str, ...]) -> int:
    """Count the required tests that a report lists; 0 if it is missing or invalid, or if the run failed.

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


def _source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text()


@cache
def _program(names: tuple[str, ...]) -> bytes:
    """Return the input of `_START`: modules of this package, since sandboxes do not have the package.

    `_START` calls `main` of the last module. The modules are compiled here; the sandbox compiles them again
    only if its Python has another bytecode version.
    """
    parts = __package__.split(".")
    modules = [(".".join(parts[: n + 1]), b"", "") for n in range(len(parts))]
    for name in names:
        text = _source(name)
        code = marshal.dumps(compile(text, f"{name}.py", "exec", optimize=0))
        modules.append((f"{__package__}.{name}", code, text))
    return marshal.dumps((MAGIC_NUMBER, modules))


_START = """\
import marshal, sys, types
magic, modules = marshal.load(sys.stdin.buffer)
same = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == magic
for name, code, text in modules:
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    exec(marshal.loads(code) if same and code else text, vars(module))
module.main()
"""


def _command(*arguments: int) -> list[str]:
    return ["python3", "-I", "-S", "-B", "-c", _START, *map(str, arguments)]
