"""The reward `code_tests`: 1 if the Python code in a completion passes the row's tests.

The code is the last fenced block of the completion or, without such a block, the completion. It runs as
`solution.py` in one sandbox; the tests run in another. The two communicate only by calls
(`rlpipe.envs.swe.grader`), so that the code can neither read nor change its tests. Tests are a list of assert
statements (MBPP's `test_list`), a text of such statements, or a unittest module that imports from `solution`.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.config.env import EnvConfig, SandboxBackend
from rlpipe.config.limits import did_you_mean
from rlpipe.envs.sandbox import check_sandbox, make_tree_runner
from rlpipe.envs.sandbox.tree import tree_of
from rlpipe.envs.swe.instances import Instance

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_CODE, _TESTS = "solution", "test_solution"
_COLUMNS = ("tests", "test_list", "test")


def code_tests(
    env: EnvConfig, columns: list[str], *, column: str = "", partial: bool = False
) -> Callable[..., float]:
    """Make the reward that is 1 where the code passes all tests of its row.

    column: column of the tests; by default the first existing one of tests, test_list, test. partial: return
    the share of passed tests instead of 0 or 1. Raises ValueError if the column is missing or the sandbox
    cannot run on this machine.
    """
    from rlpipe.envs.swe.grader.trees import code_to_grade, run_tests

    name = column or next((name for name in _COLUMNS if name in columns), "")
    if name not in columns:
        raise ValueError(
            f"reward=code_tests needs a column of tests, and there is no {name or ' or '.join(_COLUMNS)}."
            f"{did_you_mean(name, columns) if name else ''} Name it, as in "
            f"'reward={{code_tests: {{column: NAME}}}}'. The columns are {', '.join(columns)}."
        )
    if env.sandbox.backend is not SandboxBackend.BUBBLEWRAP:
        raise ValueError(
            f"reward=code_tests runs in bubblewrap, and env.sandbox.backend={env.sandbox.backend}: leave the "
            "backend out."
        )
    check_sandbox(env.sandbox)
    runner = make_tree_runner(env.sandbox)

    def score(completion: str, row: Mapping[str, Any]) -> float:
        module, ids = unittest_module(row[name])
        blocks = _FENCED.findall(completion)
        code = tree_of({f"{_CODE}.py": blocks[-1] if blocks else completion})

        files = {f"{_CODE}.py": "", f"{_TESTS}.py": module}
        instance = Instance(instance_id="row", problem_statement="", fail_to_pass=ids, files=files)
        passed = run_tests(runner, instance, code_to_grade(instance, code), env.test_timeout_s)
        return passed / len(ids) if partial else float(passed == len(ids))

    return score


def unittest_module(tests: Any) -> tuple[str, tuple[str, ...]]:
    """Return a unittest module and the ids of its tests. Raises ValueError for tests in another form.

    >>> unittest_module(["assert double(2) == 4"])[1]
    ('test_solution.Tests.test_0',)
    """
    if isinstance(tests, (list, tuple)):
        tests = "\n".join(map(str, tests))
    try:
        tree = ast.parse(tests if isinstance(tests, str) else "")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"code_tests: the tests are not valid Python: {error}.") from None

    if ids := tuple(_unittest_ids(tree)):
        return tests, ids
    if any(isinstance(statement, ast.Assert) for statement in tree.body):
        return _from_asserts(tree)
    raise ValueError(
        f"code_tests: {str(tests)[:80]!r} holds no test: give assert statements, or a unittest module with "
        f"test methods that imports from `{_CODE}`."
    )


def _unittest_ids(tree: ast.Module) -> Sequence[str]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    return [
        f"{_TESTS}.{cls.name}.{method.name}"
        for cls in classes
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]


def _from_asserts(tree: ast.Module) -> tuple[str, tuple[str, ...]]:
    """Make each assert a test; other statements (imports, helpers) come before all of them."""
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    others = [node for node in tree.body if not isinstance(node, ast.Assert)]

    # Import from the solution every function that is called but not defined here.
    called = {
        call.func.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    defined = {name for node in others for name in _defined(node)} | set(dir(builtins))
    names = sorted(called - defined)

    lines = ["import unittest", *(f"from {_CODE} import {name}" for name in names)]
    lines += [ast.unparse(node) for node in others]
    lines.append("class Tests(unittest.TestCase):")
    for number, node in enumerate(asserts):
        lines += [f"    def test_{number}(self):", f"        {ast.unparse(node)}"]
    return "\n".join(lines) + "\n", tuple(f"{_TESTS}.Tests.test_{n}" for n in range(len(asserts)))


def _defined(node: ast.stmt) -> Sequence[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return [
        name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
