"""Docker and Singularity sandboxes for instances that are stored in an image, such as SWE-bench's.

Owns safe defaults for mini-swe-agent's container environments, which start and remove the container. Commands
run through `run_bounded`, because those environments do not limit the output. One container serves one
episode. Containers that killed runs left are removed before the next run. Tested with podman; for
Singularity, tests check only the arguments.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
from pathlib import Path

import psutil
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.environments.singularity import SingularityEnvironment

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.sandbox.process import Ended, run_bounded

TESTBED = "/testbed"  # folder of the repository in SWE-bench images
_KILLED_BY_TIMEOUT = (124, 137, -9)
_OWNER = "rlpipe.owner"  # label with the machine, process namespace and process that own a container


def docker_run_args(limits: SandboxConfig) -> list[str]:
    """Return options of `docker run`: no network or capabilities; limits on memory, processes and files."""
    return [
        "--rm",
        "--network=none",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--memory={limits.memory_mb}m",
        f"--memory-swap={limits.memory_mb}m",
        f"--pids-limit={limits.processes}",
        f"--ulimit=fsize={limits.file_mb << 20}",
        f"--ulimit=cpu={limits.cpu_s}",
        "--ulimit=core=0",
        "--stop-timeout=1",
        f"--label={_OWNER}={_here()}{os.getpid()}",
    ]


def _here() -> str:
    """Return the prefix of owner labels on this machine and in this process namespace."""
    return f"{platform.node()}/{Path('/proc/self/ns/pid').stat().st_ino}/"


def remove_leftovers(executable: str = "docker") -> int:
    """Remove the containers of killed rlpipe processes; return the number of removed containers."""
    listed = _answer(executable, "ps", "-aq", "--no-trunc", f"--filter=label={_OWNER}").split()
    removed = 0
    for container in listed:
        owner = _answer(executable, "inspect", "-f", f'{{{{index .Config.Labels "{_OWNER}"}}}}', container)
        # A process id is valid only on its machine and in its namespace.
        pid = owner.strip().removeprefix(_here())
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _answer(executable, "rm", "-f", container)
            removed += 1
    return removed


def _answer(*argv: str) -> str:
    """Return the output of a client program; "" if it cannot run or does not answer."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False).stdout
    except (subprocess.TimeoutExpired, OSError):
        return ""


def singularity_exec_args(limits: SandboxConfig) -> list[str]:
    """Return options of `singularity exec`: separate namespaces, no network, no environment or home."""
    return [
        *("--contain", "--cleanenv", "--no-home", "--pid", "--ipc"),
        *("--net", "--network=none", "--no-privs"),
        f"--memory={limits.memory_mb}M",
        f"--pids-limit={limits.processes}",
    ]


class DockerSandbox:
    """A sandbox in one container. Raises InfrastructureError if the daemon or the image fails."""

    def __init__(self, limits: SandboxConfig, image: str) -> None:
        self._limits = limits
        try:
            self._environment = DockerEnvironment(
                image=image, cwd=TESTBED, run_args=docker_run_args(limits), interpreter=["bash", "-c"]
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise InfrastructureError(f"docker run {image}: {_reason(error)}") from error

    def exec_line(self, command: str, timeout_s: float) -> list[str]:
        """Return the `docker exec` line of a command, with a time limit that acts inside the container."""
        settings = self._environment.config
        return [
            *(settings.executable, "exec", "-i", "-w", settings.cwd),
            *("-e", "PYTHONDONTWRITEBYTECODE=1", "-e", "PAGER=cat"),
            str(self._environment.container_id),
            *_bounded_in_container(timeout_s),
            *settings.interpreter,
            command,
        ]

    def run(
        self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int = 0
    ) -> CommandResult:
        """Run a command in the container; output_kb, if not 0, replaces the setting.

        Raises InfrastructureError if the container has ended.
        """
        timeout_s = timeout_s or self._limits.timeout_s
        ended = _run(
            self._limits,
            self.exec_line(command, timeout_s),
            timeout_s=timeout_s,
            stdin=stdin,
            output_kb=output_kb,
        )

        # A failed command is a normal result; an ended container is an infrastructure failure.
        if ended.returncode and not self._alive():
            raise InfrastructureError(f"the container is gone: {ended.output[-500:]!r}")
        return _result(ended, timeout_s)

    def _alive(self) -> bool:
        executable, container = self._environment.config.executable, str(self._environment.container_id)
        return _answer(executable, "inspect", "-f", "{{.State.Running}}", container).strip() == "true"

    def close(self) -> None:
        """Stop and remove the container."""
        self._environment.cleanup()


class SingularitySandbox:
    """A sandbox in one unpacked image. Raises InfrastructureError if it cannot be built."""

    def __init__(self, limits: SandboxConfig, image: str) -> None:
        self._limits = limits
        try:
            self._environment = SingularityEnvironment(
                image=image, cwd=TESTBED, exec_args=singularity_exec_args(limits)
            )
        except (subprocess.SubprocessError, OSError) as error:
            raise InfrastructureError(f"singularity build {image}: {_reason(error)}") from error

    def exec_line(self, command: str, timeout_s: float) -> list[str]:
        """Return the `singularity exec` line of a command on the writable sandbox directory."""
        settings = self._environment.config
        return [
            *(settings.executable, *settings.global_args, "exec", *settings.exec_args),
            *("--pwd", settings.cwd, "--env", "PYTHONDONTWRITEBYTECODE=1,PAGER=cat"),
            *("--writable", str(self._environment.sandbox_dir)),
            *_bounded_in_container(timeout_s),
            *("bash", "-c", command),
        ]

    def run(
        self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"", output_kb: int = 0
    ) -> CommandResult:
        """Run a command in the image; output_kb, if not 0, replaces the setting.

        Raises InfrastructureError if singularity fails.
        """
        timeout_s = timeout_s or self._limits.timeout_s
        ended = _run(
            self._limits,
            self.exec_line(command, timeout_s),
            timeout_s=timeout_s,
            stdin=stdin,
            output_kb=output_kb,
        )

        if ended.returncode == 255 and b"FATAL:" in ended.output:
            raise InfrastructureError(f"singularity failed: {ended.output[-500:]!r}")
        return _result(ended, timeout_s)

    def close(self) -> None:
        """Delete the unpacked image."""
        self._environment.cleanup()


def _bounded_in_container(timeout_s: float) -> list[str]:
    """Return a prefix that ends a command inside the container: killing the client would not end it."""
    return ["timeout", "-s", "KILL", str(math.ceil(timeout_s))]


def _run(limits: SandboxConfig, argv: list[str], *, timeout_s: float, stdin: bytes, output_kb: int) -> Ended:
    # The client needs some seconds to report that the command was killed inside the container.
    grace = 10.0
    bound = (output_kb or limits.output_kb) << 10
    return run_bounded(argv, timeout_s=timeout_s + grace, max_output=bound, stdin=stdin)


def _result(ended: Ended, timeout_s: float) -> CommandResult:
    """Return the result of an ended command, with the limit that it exceeded."""
    # The time limit inside the container acts first, so the client only reports a killed command.
    exceeded = ended.exceeded
    if exceeded is None and ended.seconds >= timeout_s and ended.returncode in _KILLED_BY_TIMEOUT:
        exceeded = Limit.TIME

    return CommandResult(
        output=ended.output.decode(errors="replace"),
        exit_code=137 if exceeded else ended.returncode,
        exceeded=exceeded,
        seconds=ended.seconds,
    )


def _reason(error: Exception) -> str:
    detail = getattr(error, "stderr", None) or error
    return str(detail.decode(errors="replace") if isinstance(detail, bytes) else detail).strip()[-500:]
