"""Runs an agent command in rlpipe's sandbox, where only one network address can be reached: its endpoint.

    sandbox: runs _START -> listens at the endpoint's port in its private network -> executes the command
    this process: receives the listening socket -> the endpoint answers there

Owns what the command can see: /usr, its virtual environment and its files, all read-only, the task, and a
work tree. The command cannot see any file that grades it. All its processes have ended before grading
begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlpipe.config.env import EnvConfig, SandboxBackend
from rlpipe.config.limits import did_you_mean
from rlpipe.envs.base import AgentAddress, AgentFailed, InfrastructureError
from rlpipe.envs.sandbox import CommandResult, check_sandbox
from rlpipe.envs.sandbox.tree import Entry, File, Tree, TreeLimits, TreeTooLarge, read_tree
from rlpipe.envs.sandbox.visible import environment_of
from rlpipe.envs.user_loop import retrieve

FILES = "/agent"  # folder in the sandbox with the agent's files and the task
_MAX_OUTPUT = 1 << 20  # maximum number of bytes read from stdout and from stderr; later bytes are dropped
_MAX_ERRORS = 2000  # maximum number of characters of stderr in a message
_DAY = 86400.0
_TICK_S = 1.0  # polling interval; long, because many agents run at the same time
_LISTENS_S = 60.0  # time limit for a sandbox to start
_PATH = "/usr/local/bin:/usr/bin:/bin"
# Program that starts in the sandbox. Standard input is a JSON object; its "descriptors" are the socket over
# which to send the listener, stdout and stderr.
_START = """\
import json, os, socket, sys
order = json.load(sys.stdin)
channel, output, errors = order["descriptors"]
listener = socket.create_server(("127.0.0.1", order["port"]), backlog=128)
with socket.socket(fileno=channel) as end:
    socket.send_fds(end, [b"x"], [listener.fileno()])
for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
    os.dup2(descriptor, number)
os.closerange(3, 256)
os.environ.update(order["variables"])
os.execvp(order["words"][0], order["words"])
"""
# An agent waits for the model most of the time, so each attempt can have a thread.
_threads = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="agent")


class SandboxedCommand:
    """An agent that is a command. secret: files of this machine that it must not read.

    Raises ValueError if the command line is invalid, or cannot run in the sandbox.
    """

    def __init__(self, config: EnvConfig, secret: Sequence[Path] = ()) -> None:
        self._where = f"env.agent.run={config.agent.run!r}"
        if config.sandbox.backend is not SandboxBackend.BUBBLEWRAP:
            raise ValueError(
                f"{self._where} runs in bubblewrap, and env.sandbox.backend={config.sandbox.backend}: leave "
                "the backend out."
            )
        try:
            words = shlex.split(config.agent.run)
        except ValueError as error:
            raise ValueError(f"{self._where} is not a valid command line: {error}.") from None

        # `python` means the interpreter that runs rlpipe, whatever environment is active.
        is_python = words[0] in ("python", "python3")
        found = sys.executable if is_python else shutil.which(words[0])
        if found is None:
            raise ValueError(
                f"{self._where}: there is no program {words[0]!r} on PATH. Name it by its path, or "
                "install it."
            )
        program = Path(found).absolute()
        self._shown, self._secret = environment_of(program), secret

        # Files that the command line names are copied, like the files in `env.agent.files`.
        named = [word for word in words[1:] if Path(word).is_file()]
        paths = [Path(name).expanduser().resolve() for name in (*named, *config.agent.files)]
        for path, grading in ((path, each) for path in paths for each in secret):
            if grading.is_relative_to(path):
                raise ValueError(
                    f"{self._where} and env.agent.files={config.agent.files} would show the agent {grading}, "
                    "which grades it: name files that do not."
                )
        self._files = _tree_of(paths, config)
        self._words = [str(program), *(f"{FILES}/{Path(w).name}" if w in named else w for w in words[1:])]

        seconds = config.step_timeout_s or _DAY
        self._limits = replace(config.sandbox, timeout_s=seconds, cpu_s=math.ceil(seconds))
        self._path = f"{program.parent}:{_PATH}"

    def check(self) -> None:
        """Start a sandbox and check that the program is visible in it. Raises ValueError."""
        check_sandbox(self._limits)
        box = self._box({}, {})
        try:
            result = box.run(["test", "-x", self._words[0]], timeout_s=60.0)
        finally:
            box.cleanup()
        if result.exit_code:
            raise ValueError(
                f"{self._where}: the sandbox does not show {self._words[0]}, only /usr and "
                f"{', '.join(map(str, self._shown)) or 'nothing else'}: name what the program needs in "
                "env.agent.files, or install it in a virtual environment."
            )

    async def __call__(self, address: AgentAddress, task: dict[str, Any]) -> str | None:
        """Run the command until it ends; return its output, or None if it is empty."""
        answer, _ = await self.run_on({}, address, task)
        return answer

    async def run_on(
        self, tree: Tree, address: AgentAddress, task: dict[str, Any]
    ) -> tuple[str | None, Tree]:
        """Run the command in a work tree; return its output and the tree as the command left it.

        Raises AgentFailed with the end of stderr if the command fails, and InfrastructureError if the sandbox
        fails.
        """
        over, loop = threading.Event(), asyncio.get_running_loop()
        with contextlib.ExitStack() as parent_ends, contextlib.ExitStack() as child_ends:
            channel, end = socket.socketpair()
            parent_ends.enter_context(channel)
            child_ends.enter_context(end)
            output, errors = (_Pipe(parent_ends, child_ends) for _ in range(2))
            order = {
                "descriptors": [end.fileno(), output.write, errors.write],
                "port": urlsplit(address.root_url).port,
                "variables": self._variables(address),
                "words": self._words,
            }
            run = loop.run_in_executor(_threads, self._run, tree, task, order, over)
            run.add_done_callback(retrieve)
            reads = [asyncio.ensure_future(pipe.text()) for pipe in (output, errors)]
            try:
                await _attached(channel, address, run)
                result, left = await asyncio.shield(run)
            finally:
                # If the caller was cancelled, stop the command too.
                over.set()
                await asyncio.wait([run])
                child_ends.close()
                printed, error_text = await asyncio.gather(*reads)

        if result.exit_code:
            why = f" ({result.exceeded})" if result.exceeded else ""
            error_text = error_text.strip() or result.output.strip()
            last = error_text.rpartition("\n")[2]  # the error; first, because long messages are cut
            raise AgentFailed(
                f"{self._words[0]} ended with status {result.exit_code}{why}: {last}\n"
                f"{error_text[-_MAX_ERRORS:]}",
                _place(error_text) or self._where,
            )
        return printed.strip() or None, left

    def _run(
        self, tree: Tree, task: dict[str, Any], order: dict[str, Any], over: threading.Event
    ) -> tuple[CommandResult, Tree]:
        """Run the command in the sandbox; blocks, so it is called in a thread."""
        try:
            box = self._box(tree, {"task.json": File(json.dumps(task, default=str).encode())})
            try:
                result = box.run(
                    ["python3", "-I", "-S", "-B", "-c", _START],
                    timeout_s=self._limits.timeout_s,
                    stdin=json.dumps(order).encode(),
                    pass_fds=order["descriptors"],
                    stop=over.is_set,
                    tick_s=_TICK_S,
                )
                return result, box.tree()
            except TreeTooLarge:
                raise AgentFailed(
                    f"{self._where}: the files that it left are over env.sandbox.tree_mb.", self._where
                ) from None
            finally:
                box.cleanup()
        except OSError as error:
            raise InfrastructureError(f"the sandbox of an agent: {error}") from error

    def _box(self, tree: Tree, more: dict[str, Entry]) -> Any:
        from rlpipe.envs.sandbox.bubblewrap import ContainedBubblewrap

        folders = {FILES: self._files | more}
        return ContainedBubblewrap(
            self._limits, tree, shown=self._shown, secret=self._secret, folders=folders
        )

    def _variables(self, address: AgentAddress) -> dict[str, str]:
        """Return the environment variables that give clients the endpoint, the key and the task."""
        root_url = f"http://127.0.0.1:{urlsplit(address.root_url).port}"
        return {
            "OPENAI_BASE_URL": f"{root_url}/v1",
            "OPENAI_API_KEY": address.api_key,
            "ANTHROPIC_BASE_URL": root_url,
            "ANTHROPIC_API_KEY": address.api_key,
            "RLPIPE_TASK": f"{FILES}/task.json",
            "PATH": self._path,
        }


def _place(errors: str) -> str:
    """Return "file:line" of the last frame of the agent's files in Python's tracebacks; "" without one.

    >>> _place('  File "/agent/mine.py", line 5, in solve\\n  File "/usr/lib/json.py", line 9, in loads')
    '/agent/mine.py:5'
    """
    frames = re.findall(rf'^ *File "({FILES}/.+?)", line (\d+)', errors, re.MULTILINE)
    return ":".join(frames[-1]) if frames else ""


async def _attached(channel: socket.socket, address: AgentAddress, run: asyncio.Future[Any]) -> None:
    """Let the endpoint answer at the listening socket that the sandbox sends; return if it sends none."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(channel, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait({ready, run}, timeout=_LISTENS_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(channel)
    if not ready.done():
        return
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if descriptors:
        await address.answer_at(socket.socket(fileno=descriptors[0]))


class _Pipe:
    """A pipe that reads at most 1 MiB as text; `write` is the descriptor to write to."""

    def __init__(self, parent_ends: contextlib.ExitStack, child_ends: contextlib.ExitStack) -> None:
        read, self.write = os.pipe()
        self._read = parent_ends.enter_context(os.fdopen(read, "rb", buffering=0))
        child_ends.callback(os.close, self.write)

    async def text(self) -> str:
        """Read the pipe until it is closed; return the text."""
        reader, kept = asyncio.StreamReader(), bytearray()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._read)
        while chunk := await reader.read(1 << 16):
            kept += chunk[: _MAX_OUTPUT - len(kept)]
        transport.close()
        return kept.decode(errors="replace")


def _tree_of(paths: Sequence[Path], config: EnvConfig) -> dict[str, Entry]:
    """Read files and folders of this machine into one tree, each under its base name.

    Raises ValueError for a path that does not exist or is too large.
    """
    tree: dict[str, Entry] = {}
    limits = TreeLimits(max_bytes=config.sandbox.tree_mb << 20, max_entries=config.sandbox.tree_files)
    for path in paths:
        if path.is_file():
            tree[path.name] = File(path.read_bytes(), os.access(path, os.X_OK))
        elif path.is_dir():
            try:
                tree |= {f"{path.name}/{inner}": entry for inner, entry in read_tree(path, limits).items()}
            except TreeTooLarge:
                raise ValueError(
                    f"env.agent.files: {path} is over env.sandbox.tree_mb={config.sandbox.tree_mb} or "
                    f"tree_files={config.sandbox.tree_files}: name a smaller folder, or raise them."
                ) from None
        else:
            near = did_you_mean(path.name, [other.name for other in path.parent.glob("*")])
            raise ValueError(f"env.agent.files: there is no {path}.{near}")
    return tree
