"""Where an episode's repository lives, and how its final state is judged by the real tests.

Owns grading. Tests always run in a fresh sandbox, over what the model changed but with the instance's
own test files, and every required test id must be reported as passed:

    tree:   final tree - tests - what could shadow modules -> grader.trees, beside the instance's tests
    image:  diff of the model's container -> fresh container + test_patch -> env.test_command
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Protocol

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import CommandResult, make_container_sandbox
from rlpipe.envs.sandbox.local import TreeRunner, TreeSandbox
from rlpipe.envs.sandbox.tree import fingerprint, tree_of
from rlpipe.envs.swe.grader.trees import code_to_grade, run_tests
from rlpipe.envs.swe.instances import Instance

_PYTEST_PASSED = re.compile(r"^PASSED (\S+)", re.MULTILINE)


@dataclass(slots=True, kw_only=True, frozen=True)
class Grade:
    """changed: the repository differs from the start. passed: number of required tests that passed, of
    `required`. in_process: the tests ran in the process that imported the code, which could have cheated.
    The task is solved when it changed and all passed."""

    changed: bool
    passed: int
    required: int
    in_process: bool = False

    @property
    def solved(self) -> bool:
        """Whether this earns the reward."""
        return self.changed and self.passed == self.required


class Workspace(Protocol):
    """The repository of one episode."""

    def run(self, command: str) -> CommandResult:
        """Run a command in it. Raises InfrastructureError."""
        ...

    def grade(self) -> Grade:
        """Judge its present state. Raises InfrastructureError."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class TreeWorkspace:
    """A repository that is a tree of files on this machine."""

    def __init__(self, instance: Instance, runner: TreeRunner, config: EnvConfig) -> None:
        self._instance, self._runner, self._config = instance, runner, config
        self._sandbox = TreeSandbox(runner, tree_of(instance.files))

    def run(self, command: str) -> CommandResult:
        """Run a command in the tree."""
        return self._sandbox.run(command)

    def grade(self) -> Grade:
        """Run the tests over the tree as it is now; equal trees are graded once."""
        instance, memo = self._instance, self._runner.memo
        tree = code_to_grade(instance, self._sandbox.tree)
        required = len(instance.tests)
        if tree == code_to_grade(instance, tree_of(instance.files)):
            return Grade(changed=False, passed=0, required=required, in_process=instance.graded_in_process)
        key = ("grade", instance.instance_id, fingerprint(tree))
        passed = memo.get(key) if memo else None
        if passed is None:
            passed = run_tests(self._runner, instance, tree, self._config.test_timeout_s)
            if memo:
                memo.put(key, passed, size=256)
        return Grade(changed=True, passed=passed, required=required, in_process=instance.graded_in_process)

    def close(self) -> None:
        """Nothing is held between commands."""
        self._sandbox.close()


class ImageWorkspace:
    """A repository in a container image, as SWE-bench's are."""

    def __init__(self, instance: Instance, config: EnvConfig) -> None:
        self._instance, self._config = instance, config
        self._image = config.sandbox.image or instance.image_name
        self._sandbox = make_container_sandbox(config.sandbox, self._image)
        head = self._sandbox.run("git rev-parse HEAD")
        if head.exit_code:
            raise InfrastructureError(f"image {self._image} has no git repository: {head.output[-300:]!r}")
        self._head = head.output.strip()

    def run(self, command: str) -> CommandResult:
        """Run a command in the container."""
        return self._sandbox.run(command)

    def grade(self) -> Grade:
        """Carry the model's changes into a fresh container and run the tests there."""
        instance = self._instance
        diff = self._sandbox.run(f"git add -A && git diff --cached --binary {self._head}")
        changed = diff.exit_code == 0 and diff.exceeded is None and bool(diff.output.strip())
        passed = self._passed_in_fresh_container(diff.output) if changed else 0
        return Grade(changed=changed, passed=passed, required=len(instance.tests))

    def _passed_in_fresh_container(self, patch: str) -> int:
        instance, config = self._instance, self._config
        fresh = make_container_sandbox(config.sandbox, self._image)
        try:
            if fresh.run(apply_command(instance.patched_tests), stdin=patch.encode()).exit_code:
                return 0
            if instance.test_patch:
                tests = fresh.run("git apply -", stdin=instance.test_patch.encode())
                if tests.exit_code:
                    raise InfrastructureError(f"test_patch does not apply: {tests.output[-300:]!r}")
            command = config.test_command.replace("{tests}", shlex.join(instance.tests))
            result = fresh.run(command, timeout_s=config.test_timeout_s)
            if result.exceeded:
                return 0
            passed = len(set(instance.tests) & set(_PYTEST_PASSED.findall(result.output)))
            # the code under test can print such lines; the command's exit code must agree with them
            return passed if result.exit_code == 0 else min(passed, len(instance.tests) - 1)
        finally:
            fresh.close()

    def close(self) -> None:
        """Remove the container."""
        self._sandbox.close()


def apply_command(tests: list[str]) -> str:
    """Apply a patch from stdin, without its changes to the tests and to pytest's hooks.

    >>> apply_command(["t/test_a.py"])
    "git apply --exclude=conftest.py '--exclude=*/conftest.py' --exclude=t/test_a.py -"
    """
    excluded = [f"--exclude={path}" for path in ["conftest.py", "*/conftest.py", *tests]]
    return shlex.join(["git", "apply", *excluded, "-"])
