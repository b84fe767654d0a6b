"""The repository of an episode, and the grading of its final state by the instance's tests.

Owns grading. Tests always run in a new sandbox, on the model's changes but with the instance's test files,
and every required test id must be reported as passed:

    tree:   final tree - tests - files that shadow modules -> grader.trees, together with the instance's tests
    image:  diff of the model's container -> grader.images, in a new container with test_patch; the same for a
            repository that is checked out into a sandbox on this machine (`checkout`)
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import CommandResult, Limit, make_container_sandbox
from rlpipe.envs.sandbox.local import TreeRunner, TreeSandbox
from rlpipe.envs.sandbox.tree import Tree, fingerprint, tree_of
from rlpipe.envs.swe.checkout import CheckoutSandbox
from rlpipe.envs.swe.grader.images import passed_tests
from rlpipe.envs.swe.grader.trees import code_to_grade, run_tests
from rlpipe.envs.swe.instances import Instance
from rlpipe.envs.swe.tamper import changes_of_diff, changes_of_trees, tampering

if TYPE_CHECKING:
    from rlpipe.envs.sandbox.container import DockerSandbox, SingularitySandbox

# Output is text and a diff may contain any bytes, so use base64. `git apply --exclude` would miss renames.
_DIFF = (
    "set -o pipefail; {{ git add -A && git diff --cached --binary --no-renames --no-ext-diff --no-textconv "
    "--no-color --src-prefix=a/ --dst-prefix=b/ {head}; }} 2>/dev/null | base64 -w0"
)


@dataclass(slots=True, kw_only=True, frozen=True)
class Grade:
    """The result of grading; the task is solved if the repository changed and all required tests passed.

    changed: whether the repository differs from the start. passed: number of required tests that passed.
    required: number of required tests. in_process: whether the tests ran in the process that imported the
    model's code, which could have cheated. tamper: suspicious parts of the changes, see `tamper`.
    """

    changed: bool
    passed: int
    required: int
    in_process: bool = False
    tamper: str = ""

    @property
    def solved(self) -> bool:
        """Return whether the task is solved, that is, whether this grade earns the reward."""
        return self.changed and self.passed == self.required

    def info(self) -> dict[str, Any]:
        """Return the values of this grade to record."""
        info = {"changed": self.changed, "tests_passed": self.passed, "tests_required": self.required}
        info |= {"graded_in_process": True} if self.in_process else {}
        return info | ({"tamper": self.tamper} if self.tamper else {})


class Workspace(Protocol):
    """The repository of one episode."""

    def run(self, command: str, *, stdin: bytes = b"") -> CommandResult:
        """Run a command in the repository. Raises InfrastructureError if the sandbox fails."""
        ...

    def grade(self) -> Grade:
        """Grade the current state of the repository. Raises InfrastructureError if the sandbox fails."""
        ...

    def close(self) -> None:
        """Delete the repository."""
        ...


class TreeWorkspace:
    """A repository that is a tree of files on this machine."""

    def __init__(self, instance: Instance, runner: TreeRunner, config: EnvConfig) -> None:
        self._instance, self._runner, self._config = instance, runner, config
        self._sandbox = TreeSandbox(runner, tree_of(instance.files))

    def run(self, command: str, *, stdin: bytes = b"") -> CommandResult:
        """Run a command in the tree."""
        return self._sandbox.run(command, stdin=stdin)

    def grade(self) -> Grade:
        """Run the tests on the current tree; equal trees are graded only once."""
        instance, memo = self._instance, self._runner.memo
        tree = code_to_grade(instance, self._sandbox.tree)
        required = len(instance.tests)

        # Without a change, the tests would fail as before, so do not run them.
        if tree == code_to_grade(instance, tree_of(instance.files)):
            return Grade(changed=False, passed=0, required=required, in_process=instance.graded_in_process)

        key = ("grade", instance.instance_id, fingerprint(tree))
        passed = memo.get(key) if memo else None
        if passed is None:
            passed = run_tests(self._runner, instance, tree, self._config.test_timeout_s)
            if memo:
                memo.put(key, passed, size=256)

        return Grade(
            changed=True,
            passed=passed,
            required=required,
            in_process=instance.graded_in_process,
            tamper=tampering(changes_of_trees(tree_of(instance.files), self._sandbox.tree)),
        )

    @property
    def tree(self) -> Tree:
        """Return the repository's files."""
        return self._sandbox.tree

    def replace(self, tree: Tree) -> None:
        """Take the files that an agent left."""
        self._sandbox.tree = tree

    def close(self) -> None:
        """Free the resources of the tree."""
        self._sandbox.close()


class ImageWorkspace:
    """A repository in a container image, such as SWE-bench's."""

    def __init__(self, instance: Instance, config: EnvConfig) -> None:
        self._instance, self._config = instance, config
        self._sandbox = self._fresh()

        head = self._sandbox.run("git rev-parse HEAD")
        if head.exit_code:
            raise InfrastructureError(f"{self._where} has no git repository: {head.output[-300:]!r}")

        self._head = head.output.strip()

    @property
    def _where(self) -> str:
        return f"image {self._config.sandbox.image or self._instance.image_name}"

    def _fresh(self) -> DockerSandbox | SingularitySandbox | CheckoutSandbox:
        """Start a sandbox with the unchanged repository. Raises InfrastructureError if it fails."""
        image = self._config.sandbox.image or self._instance.image_name
        return make_container_sandbox(self._config.sandbox, image)

    def run(self, command: str, *, stdin: bytes = b"") -> CommandResult:
        """Run a command in the container."""
        return self._sandbox.run(command, stdin=stdin)

    def grade(self) -> Grade:
        """Apply the model's changes in a new container and run the tests there."""
        required = len(self._instance.tests)
        diff = self._sandbox.run(_DIFF.format(head=self._head), output_kb=self._config.sandbox.tree_mb << 10)

        # A diff that was cut cannot be applied, so no test counts as passed.
        if diff.exceeded is Limit.OUTPUT:
            return Grade(changed=True, passed=0, required=required, in_process=True, tamper="too_large")

        try:
            patch = base64.b64decode(diff.output, validate=True)
        except ValueError:
            patch = b""

        if diff.exit_code or not patch:
            return Grade(changed=False, passed=0, required=required, in_process=True)

        fresh = self._fresh()
        try:
            passed = passed_tests(fresh, self._instance, patch, self._config)
        finally:
            fresh.close()

        tamper = tampering(changes_of_diff(patch.decode(errors="replace")))
        return Grade(changed=True, passed=passed, required=required, in_process=True, tamper=tamper)

    def close(self) -> None:
        """Remove the container."""
        self._sandbox.close()


class CheckoutWorkspace(ImageWorkspace):
    """A repository that is checked out from a mirror into a sandbox on this machine, without containers."""

    _sandbox: CheckoutSandbox

    @property
    def _where(self) -> str:
        return f"the checkout of {self._instance.repo}"

    def _fresh(self) -> CheckoutSandbox:
        return CheckoutSandbox(self._config, self._instance)

    @property
    def tree(self) -> Tree:
        """Return the repository's files, including `.git`."""
        return self._sandbox.tree

    def replace(self, tree: Tree) -> None:
        """Take the files that an agent left."""
        self._sandbox.replace(tree)
