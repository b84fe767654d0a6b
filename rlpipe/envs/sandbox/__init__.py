"""Sandboxes: containment for the commands that a model writes.

Owns the choice of a backend and the check that it works. `local` runs commands in bubblewrap on this machine
and treats a work tree as a value; `container` runs them in an image. Backends are imported on use, so that a
configuration can be read without them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from rlpipe.config.env import SandboxBackend, SandboxConfig
from rlpipe.config.home import provide_home
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox.base import CommandResult, Limit, Sandbox
from rlpipe.envs.sandbox.leftovers import remove_leftovers
from rlpipe.envs.sandbox.tree import scratch

if TYPE_CHECKING:
    from rlpipe.envs.sandbox.container import DockerSandbox, SingularitySandbox
    from rlpipe.envs.sandbox.local import TreeRunner

__all__ = [
    "CommandResult",
    "Limit",
    "Sandbox",
    "check_sandbox",
    "make_container_sandbox",
    "make_tree_runner",
]

# mini-swe-agent prints a banner and creates a folder in the user's home when it is imported.
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
provide_home()
_PACKAGES = {"bwrap": "bubblewrap", "setpriv": "util-linux"}
_SCRATCH_PROBE = 4 << 20  # bytes of the test file
_NAMESPACES = (
    "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu 24.04 also "
    "kernel.apparmor_restrict_unprivileged_userns=0; inside Docker: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined)"
)


def check_sandbox(config: SandboxConfig) -> None:
    """Check that the sandbox works on this machine, by running a command in it.

    Also removes leftovers of killed runs. Raises ValueError that names what is missing, with a hint.
    """
    if config.backend is not SandboxBackend.BUBBLEWRAP:
        _check_container_tool(config)
        return

    if sys.platform != "linux":
        raise ValueError(
            f"env.sandbox.backend=bubblewrap needs Linux, this is {sys.platform}: "
            "run in a Linux machine or container, or set env.sandbox.backend=docker."
        )

    # Limits on the number of processes do not apply to root, so root must run commands as another user.
    tools = ["bwrap"] + (["setpriv"] if os.geteuid() == 0 else [])
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise ValueError(
            f"the sandbox needs {', '.join(missing)}, not found on PATH: apt-get install {packages} "
            "(the tool bwrap is the package bubblewrap), or set env.sandbox.backend=docker. "
            "Commands written by a model never run without a sandbox."
        )

    remove_leftovers()
    _check_scratch()

    # The second command checks that /proc is mounted in the sandbox.
    try:
        result, _ = make_tree_runner(config).run({}, "python3 -c 'print(6 * 7)' && grep -q . /proc/1/comm")
    except InfrastructureError as error:
        raise ValueError(f"the sandbox does not start here: {error}. {_NAMESPACES}.") from error

    if result.output != "42\n" or result.exit_code:
        raise ValueError(
            f"the sandbox starts but python3 does not run in it: {result.output.strip()[-300:]!r}. "
            "Only /usr is visible inside: apt-get install python3 gives it /usr/bin/python3."
        )


def _check_scratch() -> None:
    """Write a small file into the folder of work trees. Raises ValueError if there is no space."""
    folder = scratch()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_SCRATCH_PROBE))
    except OSError as error:
        raise ValueError(
            f"the sandbox cannot write {_SCRATCH_PROBE >> 20} MiB into {folder} ({error.strerror}), where "
            "every attempt has its files: remove what fills it, or enlarge it (docker run --shm-size=2g)."
        ) from error


def _check_container_tool(config: SandboxConfig) -> None:
    """Raise ValueError if the container tool is missing or does not answer."""
    tool = config.backend.value
    if shutil.which(tool) is None:
        raise ValueError(
            f"env.sandbox.backend={tool} needs the program {tool}, not found on PATH: install it, "
            "or set env.sandbox.backend=bubblewrap."
        )

    probe = [tool, "version"] if config.backend is SandboxBackend.DOCKER else [tool, "--version"]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"`{' '.join(probe)}` does not answer: restart the {tool} service.") from error

    if answer.returncode:
        raise ValueError(
            f"`{' '.join(probe)}` fails: {answer.stderr.strip()[-300:]!r}. Start the {tool} service and "
            "give this user access to it."
        )

    if config.backend is SandboxBackend.DOCKER:
        from rlpipe.envs.sandbox.container import remove_leftovers as remove_containers

        remove_containers()


def make_tree_runner(config: SandboxConfig) -> TreeRunner:
    """Return a runner that runs commands on trees of files in bubblewrap."""
    from rlpipe.envs.sandbox.local import TreeRunner

    return TreeRunner(config)


def make_container_sandbox(config: SandboxConfig, image: str) -> DockerSandbox | SingularitySandbox:
    """Start a new container of an image. Raises InfrastructureError if it does not start."""
    from rlpipe.envs.sandbox.container import DockerSandbox, SingularitySandbox

    docker = config.backend is SandboxBackend.DOCKER
    return DockerSandbox(config, image) if docker else SingularitySandbox(config, f"docker://{image}")
