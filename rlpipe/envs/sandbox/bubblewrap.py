"""mini-swe-agent's bubblewrap environment, hardened for commands that a model wrote.

Owns the containment of one command on this machine, with a new directory and new namespaces every time:

    host -> setpriv (only when we are root) -> bwrap -> sh (process 1) -> bash -c COMMAND, or a program

| threat               | what contains it                                                          |
| fork bomb            | RLIMIT_NPROC per user namespace; setpriv, since the limit excludes root   |
| surviving processes  | the pid namespace ends with process 1, and bwrap reaps it before it ends  |
| memory, files        | RLIMIT_AS and RLIMIT_FSIZE for each process; a monitor checks their sums  |
| output, wall time    | `process.run_bounded`                                                     |
| host files, secrets  | only /usr is visible, read-only; bwrap itself starts with an empty env    |
| network, signals     | separate namespaces                                                       |
| kernel surface, keys | no capabilities, no further user namespaces, a system call filter         |
| memory outside       | the filter denies memfds, System V objects, attributes; the monitor       |
| processes            | counts deleted open files; pipes: the kernel's 64 MiB for each user       |

If the machine allows control groups (`cgroup`), a group limits memory, processes and CPU of everything that
belongs to a command, including pipes, page tables and socket buffers, even in a burst. Otherwise the monitor
limits the sum of memory. It checks ten times a second, so a new process may exceed the limit until the next
check. It does not count socket buffers (at most processes x open files x 208 KiB). RLIMIT_AS and RLIMIT_FSIZE
act at once. The OOM killer is set to choose these processes first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import cgroup
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.sandbox.descendants import descendants
from rlpipe.envs.sandbox.leftovers import NOBODY, prefix
from rlpipe.envs.sandbox.process import FILTER_FD, GATE_FD, STATUS_FD, TICK_S, Ended, run_bounded
from rlpipe.envs.sandbox.seccomp import program
from rlpipe.envs.sandbox.tree import (
    Tree,
    TreeLimits,
    TreeTooLarge,
    exceeds,
    read_tree,
    remove_tree,
    scratch,
    write_tree,
)
from rlpipe.envs.sandbox.visible import USR, hide, show

WORK = "/work"
_OPEN_FILES = 256
_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
# The shell sets the limits of every process; for processes, `ulimit` has -u in bash, -p in dash and busybox.
_PROCESS_1 = """
u=-p; [ -z "$BASH_VERSION" ] || u=-u
ulimit $u {} && ulimit -v {} && ulimit -f {} && ulimit -t {} && ulimit -n {} && ulimit -c 0 || exit 125
echo 1000 > /proc/self/oom_score_adj; "$@"; exit $?"""


class ContainedBubblewrap(BubblewrapEnvironment):
    """A mini-swe-agent environment on a private work tree, with limits on every resource.

    shown: files and folders of this machine, in addition to /usr, that commands may read at the same paths.
    secret: files in `shown` or /usr that commands may not read. folders: further trees, by the path at which
    commands can read them. Raises OSError if the work directory cannot be created or filled.
    """

    def __init__(
        self,
        limits: SandboxConfig,
        tree: Tree,
        *,
        shown: Sequence[Path] = (),
        secret: Sequence[Path] = (),
        folders: Mapping[str, Tree] | None = None,
    ) -> None:
        self.limits = limits
        self.tree_limits = TreeLimits(max_bytes=limits.tree_mb << 20, max_entries=limits.tree_files)
        self.working_dir = Path(tempfile.mkdtemp(prefix=prefix(), dir=scratch()))
        self.work, tmp = self.working_dir / "work", self.working_dir / "tmp"
        owner = NOBODY if os.geteuid() == 0 else None
        for directory in (self.working_dir, self.work, tmp):
            directory.mkdir(exist_ok=True)
            if owner is not None:
                os.chown(directory, owner, owner)

        write_tree(tree, self.work, owner)
        # If a visible path of this machine is below /work, mount the work tree elsewhere.
        cwd = next(p for p in (WORK, "/workspace") if not any(path.is_relative_to(p) for path in shown))
        mounts = ["--bind", str(tmp), "/tmp", "--bind", str(self.work), cwd, "--chdir", cwd]

        points = self.working_dir / "shown"
        points.mkdir()
        self._before, options = show(shown, points, as_nobody=owner is not None)
        mounts += options
        for number, (path, content) in enumerate((folders or {}).items()):
            folder = self.working_dir / f"folder{number}"
            folder.mkdir()
            write_tree(content, folder, owner)
            mounts += ["--ro-bind", str(folder), path]
        mounts += hide([USR, Path(sys.base_prefix), *shown], secret)
        self.config = BubblewrapEnvironmentConfig(
            cwd=cwd,
            env={},
            timeout=max(1, round(limits.timeout_s)),
            executable=_tool("bwrap"),
            wrapper_args=[*_system(), *mounts, "--remount-ro", "/"],
        )

    def run(
        self,
        command: str | list[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        output_kb: int = 0,
        pass_fds: Sequence[int] = (),
        stop: Callable[[], bool] = lambda: False,
        tick_s: float = TICK_S,
    ) -> CommandResult:
        """Run a shell command, or a program with its arguments without a shell.

        output_kb: if not 0, replaces the setting. pass_fds: further descriptors to inherit. stop: function;
        soon after it returns true, the command is ended. tick_s: seconds between two checks.
        Raises InfrastructureError if bwrap fails before the command starts, and OSError like the constructor.
        """
        group = self._group()
        try:
            ended = run_bounded(
                self.command_line(command),
                timeout_s=timeout_s,
                max_output=(output_kb or self.limits.output_kb) << 10,
                stdin=stdin,
                env={},
                filter_program=program(),
                admit=lambda status: _admit(status, group),
                watch=lambda pid: Limit.TIME if stop() else self._watch(pid, group, tick_s),
                end=_end,
                pass_fds=pass_fds,
                tick_s=tick_s,
            )
            if group and group.ran_out_of_memory():
                ended.exceeded = ended.exceeded or Limit.MEMORY
        finally:
            if group:
                group.remove()
        return _result(ended)

    def _group(self) -> cgroup.Group | None:
        """Make a control group for a command, named after this process; None if they are not available."""
        limits, parents = self.limits, cgroup.controllers()
        if not parents:
            return None

        return cgroup.Group(
            self.working_dir.name,
            parents,
            memory=limits.memory_mb << 20,
            processes=limits.processes,
            cores=max(1.0, limits.cpu_s / limits.timeout_s),
        )

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run action["command"]; the method that mini-swe-agent calls. timeout: seconds.

        Raises ValueError for a `cwd` that is not the work tree.
        """
        if cwd not in ("", self.config.cwd):
            raise ValueError(
                f"a contained command runs in {self.config.cwd}, not in {cwd!r}: put `cd` in the command."
            )
        result = self.run(action.get("command", ""), timeout_s=timeout or self.limits.timeout_s)
        return {
            "output": result.output,
            "returncode": result.exit_code,
            "exception_info": result.exceeded or "",
        }

    def command_line(self, command: str | list[str]) -> list[str]:
        """Return the full argument vector, from the outermost program to the command."""
        limits = self.limits
        # units: processes, KiB, blocks of 512 bytes, seconds, descriptors
        bounds = limits.processes, limits.memory_mb << 10, limits.file_mb << 11, limits.cpu_s, _OPEN_FILES
        process_1 = _PROCESS_1.format(*bounds)

        drop = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        return [
            *self._before,
            *([_tool("setpriv"), *drop] if os.geteuid() == 0 else []),
            self.config.executable,
            *self.config.wrapper_args,
            *("--json-status-fd", STATUS_FD, "--seccomp", FILTER_FD, "--block-fd", GATE_FD),
            *("--", "sh", "-c", process_1, "sh"),
            *(["bash", "-c", command] if isinstance(command, str) else command),
        ]

    def tree(self) -> dict[str, Any]:
        """Return the current work tree. Raises TreeTooLarge if it exceeds the limits."""
        return read_tree(self.work, self.tree_limits)

    def cleanup(self) -> None:
        """Remove the work directory."""
        if self.working_dir.exists():
            remove_tree(self.working_dir)

    def _watch(self, pid: int, group: cgroup.Group | None, tick_s: float) -> Limit | None:
        """Return the limit that a running command exceeds, memory or files; None if it exceeds neither."""
        used, deleted = 0, {}
        for process in descendants(pid, max_age_s=tick_s):
            used += _memory(process)
            deleted |= _deleted_files(process)

        # A control group counts memory exactly; without one, use the sum over the processes.
        if group is not None and "memory" in group.controllers:
            too_much = group.ran_out_of_memory()
        else:
            too_much = used > self.limits.memory_mb << 20
        if too_much:
            return Limit.MEMORY

        return Limit.FILES if exceeds(self.working_dir, self.tree_limits, sum(deleted.values())) else None


def execute(
    config: SandboxConfig, tree: Tree, command: str | list[str], *, timeout_s: float, **options: Any
) -> tuple[CommandResult, Tree]:
    """Run a command on a tree; return its result and the resulting tree. options: see `run`.

    If the resulting tree exceeds its limit, the old tree is returned and the result has `Limit.FILES`.
    Raises InfrastructureError if bwrap cannot start or the disk fails.
    """
    try:
        box = ContainedBubblewrap(config, tree)
        try:
            result = box.run(command, timeout_s=timeout_s, **options)
            try:
                return result, box.tree()
            except TreeTooLarge:
                return _undone(result), tree
        finally:
            box.cleanup()
    except OSError as error:
        raise InfrastructureError(f"sandbox directory in {scratch()}: {error}") from error


def _memory(pid: int) -> int:
    """Return the memory of a process in bytes: resident, swapped and page tables; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("VmRSS:", "VmSwap:", "VmPTE:"))


def _deleted_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the sizes in bytes of deleted files that a process holds open, by device and inode."""
    sizes = {}
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                info = Path(descriptor.path).stat()
                if stat.S_ISREG(info.st_mode) and not info.st_nlink:
                    sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sizes


def _undone(result: CommandResult) -> CommandResult:
    return CommandResult(output=result.output, exit_code=137, exceeded=Limit.FILES, seconds=result.seconds)


def _admit(status: bytes, group: cgroup.Group | None) -> bool:
    """Move process 1 into its control group; return whether process 1 has started.

    This is done before bwrap runs the command. Moving may take long on a busy machine, so it runs while bwrap
    mounts file systems.
    """
    process_1 = _process_1(status)
    if process_1 and group:
        with contextlib.suppress(ProcessLookupError):  # the process has failed, and bwrap reports why
            group.add(process_1)
    return process_1 is not None


def _end(process: subprocess.Popen[bytes], status: bytes) -> None:
    """Kill process 1 of the sandbox, which bwrap then reaps; kill bwrap if process 1 has not started."""
    if process_1 := _process_1(status):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_1, signal.SIGKILL)
    else:
        process.kill()


def _process_1(status: bytes) -> int | None:
    return next((one["child-pid"] for one in _documents(status) if "child-pid" in one), None)


def _result(ended: Ended) -> CommandResult:
    """Return the result of an ended command. Raises InfrastructureError if bwrap failed."""
    output = ended.output.decode(errors="replace")
    codes = [d["exit-code"] for d in _documents(ended.status) if "exit-code" in d]
    if ended.exceeded is None and not codes:
        raise InfrastructureError(
            f"bwrap ended with status {ended.returncode} and did not run the command: {output[-500:]!r}"
        )

    return CommandResult(
        output=output,
        exit_code=137 if ended.exceeded else codes[0],
        exceeded=ended.exceeded,
        seconds=ended.seconds,
    )


def _documents(status: bytes) -> list[dict[str, Any]]:
    """Parse the complete lines of bwrap's JSON status."""
    return [json.loads(line) for line in status.split(b"\n")[:-1] if line.strip()]


@functools.cache
def _tool(name: str) -> str:
    """Return the absolute path of a host tool. Raises InfrastructureError if it vanished after launch."""
    path = shutil.which(name)
    if path is None:
        raise InfrastructureError(f"{name} is not on PATH any more")
    return path


@functools.cache
def _system() -> tuple[str, ...]:
    """Return the bwrap options that do not depend on the command: namespaces, mounts, environment."""
    known = subprocess.run([_tool("bwrap"), "--help"], capture_output=True, text=True, check=False).stdout
    options = ["--unshare-all", "--unshare-user", "--hostname", "sandbox"]
    options += ["--disable-userns"] if "--disable-userns" in known else []
    options += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]

    # Which of these are links into /usr depends on the distribution.
    options += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        options += ["--ro-bind-try", path, path]

    # A Python outside /usr (conda, uv) is visible to the command at its path on the host.
    search: list[str] = list(_PATH)
    if not any(Path(directory, "python3").exists() for directory in search):
        options += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        search.insert(0, f"{sys.base_prefix}/bin")

    options += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--clearenv"]
    environment = {
        "PATH": ":".join(search),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    for name, value in environment.items():
        options += ["--setenv", name, value]
    return tuple(options)
