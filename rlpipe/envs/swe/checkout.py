"""Repositories of instances on this machine: git mirrors in `env.repos`, and a checkout in each sandbox.

Owns the search for a repository's mirror, and the sandbox that replaces an image if there are no containers.
In the sandbox, a new repository has the files of `base_commit` as its only commit, so that the agent cannot
look up later commits. The Python that `env.test_command` starts provides the packages; with containers, the
image of the instance provides them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import CommandResult
from rlpipe.envs.sandbox.tree import Tree, TreeLimits, TreeTooLarge, read_tree
from rlpipe.envs.sandbox.visible import environment_of
from rlpipe.envs.swe.instances import Instance

_AUTHOR = "-c user.name=rlpipe -c user.email=rlpipe@localhost"
_COMMIT = f"git init -q && git add -A -f && git {_AUTHOR} commit -q --allow-empty --no-verify -m base"


def mirror_of(config: EnvConfig, repo: str) -> Path:
    """Return the mirror of a repository: a git directory or a work tree. Raises ValueError if there is none.

    repo: OWNER/NAME; the folder in `env.repos` is OWNER/NAME or OWNER__NAME, with or without .git at the end.
    """
    folder = Path(config.repos).expanduser().resolve()
    names = [f"{name}{end}" for name in (repo, repo.replace("/", "__")) for end in ("", ".git")]
    for path in (folder / name for name in names):
        if path.is_dir():
            return path
    raise ValueError(
        f"env.repos={config.repos!r} has no repository of {repo}: `git clone --mirror URL "
        f"{folder}/{repo}.git`."
    )


def check_mirrors(config: EnvConfig, instances: Iterable[Instance]) -> None:
    """Raise ValueError if a mirror or the base commit of an instance is missing."""
    commits: dict[str, list[Instance]] = {}
    for instance in instances:
        commits.setdefault(instance.repo, []).append(instance)
    for repo, wanted in commits.items():
        mirror = mirror_of(config, repo)
        revisions = "".join(f"{instance.base_commit}^{{commit}}\n" for instance in wanted)
        answered = _git(mirror, "cat-file", "--batch-check", stdin=revisions).splitlines()
        for instance, line in zip(wanted, answered, strict=True):
            if line.endswith("missing"):
                raise ValueError(
                    f"{mirror} has no commit {instance.base_commit} of instance {instance.instance_id!r}: "
                    "fetch it."
                )


@functools.lru_cache(maxsize=64)
def files_at(mirror: Path, commit: str, limits: TreeLimits) -> Tree:
    """Return all files of a commit, including those that git attributes leave out of archives.

    Raises InfrastructureError if git fails, or if the files exceed the limits.
    """
    with tempfile.TemporaryDirectory(prefix="rlpipe-checkout-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git(mirror, "read-tree", commit, environment=index)
        _git(mirror, f"--work-tree={work}", "checkout-index", "-a", "-f", environment=index)
        try:
            return read_tree(work, limits)
        except TreeTooLarge:
            raise InfrastructureError(
                f"{mirror} at {commit} is over env.sandbox.tree_mb or tree_files: raise them."
            ) from None


def _git(mirror: Path, *arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> str:
    """Run git on a mirror; return its output. Raises InfrastructureError if it fails."""
    directory = mirror / ".git" if (mirror / ".git").exists() else mirror
    command = ["git", "-c", "safe.directory=*", f"--git-dir={directory}", *arguments]
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    if done.returncode:
        raise InfrastructureError(f"{mirror}: git {arguments[0]} fails: {done.stderr.strip()[-300:]}")
    return done.stdout


class CheckoutSandbox:
    """A repository at the commit of an instance; a `Sandbox` whose files persist between commands.

    Raises InfrastructureError if it cannot be created.
    """

    def __init__(self, config: EnvConfig, instance: Instance) -> None:
        sandbox = config.sandbox
        self._config = config
        self._limits = TreeLimits(max_bytes=sandbox.tree_mb << 20, max_entries=sandbox.tree_files)
        self._python = _python_of(config.test_command)
        try:
            mirror = mirror_of(config, instance.repo)
        except ValueError as error:
            raise InfrastructureError(str(error)) from None

        self._open(files_at(mirror, instance.base_commit, self._limits))
        made = self.run(_COMMIT)
        if made.exit_code:
            self.close()
            raise InfrastructureError(f"git in the sandbox fails: {made.output.strip()[-300:]}")

    def _open(self, tree: Tree) -> None:
        """Start the sandbox on a tree. Raises InfrastructureError if it fails."""
        from rlpipe.envs.sandbox.bubblewrap import ContainedBubblewrap

        secret = [Path(name).expanduser().resolve() for name in self._config.instance_files]
        try:
            self._box = ContainedBubblewrap(
                self._config.sandbox, tree, shown=environment_of(self._python), secret=secret
            )
        except OSError as error:
            raise InfrastructureError(f"the sandbox of a repository: {error}") from error

    def run(
        self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int = 0
    ) -> CommandResult:
        """Run a command in the repository; output_kb, if not 0, replaces the setting."""
        return self._box.run(
            f"export PATH={self._python.parent}:$PATH; {command}",
            timeout_s=timeout_s or self._config.sandbox.timeout_s,
            stdin=stdin,
            output_kb=output_kb,
        )

    @property
    def tree(self) -> Tree:
        """Return the repository's files. Raises InfrastructureError if they exceed the limits."""
        try:
            return self._box.tree()
        except TreeTooLarge:
            raise InfrastructureError("the repository is over env.sandbox.tree_mb or tree_files") from None

    def replace(self, tree: Tree) -> None:
        """Replace all files of the repository."""
        self.close()
        self._open(tree)

    def close(self) -> None:
        """Delete the repository's files."""
        self._box.cleanup()


def _python_of(command: str) -> Path:
    """Return the path of Python in a test command; if the command has no such path, rlpipe's Python."""
    first = command.split()[0]
    found = sys.executable if first in ("python", "python3") else shutil.which(first)
    return Path(found or sys.executable).absolute()
