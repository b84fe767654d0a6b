"""Runs an agent on one task: a function of this process, or a command in a process of its own.

Owns the agent's input (base URL, key, task) and its answer. A command works in a new folder, and
all of its processes are ended with it. What an agent does with the model's words is its own affair: one that
runs them needs a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlpipe.config.env import AgentConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.base import AgentAddress, named_by
from rlpipe.envs.contract import shown

Program = Callable[[AgentAddress, dict[str, Any]], "str | Awaitable[str | None] | None"]
_NAMES = ("base_url", "api_key", "task", "root_url")
_MAX_OUTPUT = 1 << 20  # bytes of a command's standard output that are read; the rest is dropped
_MAX_ERRORS = 2000  # characters of its standard error in a message


def load_agent(config: AgentConfig) -> Program:
    """Return the program that `env.agent.run` names. Raises ValueError when it is none, or cannot run."""
    where = f"env.agent.run={config.run!r}"
    if not config.run.strip():
        raise ValueError(
            "env.agent.run is empty: name a function of (base_url, api_key, task), as in "
            "env.agent.run=my_agent.py:solve, or a command line."
        )
    if config.is_function:
        return _Function(
            load_function(config.run, setting="env.agent.run", takes=", ".join(_NAMES[:3])), where
        )

    try:
        words = shlex.split(config.run)
    except ValueError as error:
        raise ValueError(f"{where} is not a command line: {error}.") from None
    program = shutil.which(words[0])
    if program is None:
        raise ValueError(
            f"{where}: there is no program {words[0]!r} on PATH. Name it by its path, or install it."
        )

    # Relative paths are of the folder in which the run was started; the command works in one of its own.
    here = Path.cwd()
    arguments = [str(here / word) if (here / word).is_file() else word for word in words[1:]]
    return _Command([str(Path(program).absolute()), *arguments])


class _Function:
    """An agent that is a function of this process."""

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._function, self._where = function, where
        known = dict.fromkeys(_NAMES)
        try:
            inspect.signature(function).bind(**named_by(function, **known))
        except TypeError as error:
            raise ValueError(
                f"{where}: its parameters must be among {', '.join(_NAMES)} ({error}): give others defaults."
            ) from None

    def __call__(self, address: AgentAddress, task: dict[str, Any]) -> str | Awaitable[str | None] | None:
        """Call it; return its answer, or what to await for it."""
        told = {
            "base_url": f"{address.root_url}/v1",
            "api_key": address.api_key,
            "task": task,
            "root_url": address.root_url,
        }
        returned = self._function(**named_by(self._function, **told))
        return self._awaited(returned) if inspect.isawaitable(returned) else self._answer(returned)

    async def _awaited(self, returned: Awaitable[Any]) -> str | None:
        return self._answer(await returned)

    def _answer(self, returned: Any) -> str | None:
        if returned is None or isinstance(returned, str):
            return returned
        raise ValueError(
            f"{self._where} returned {shown(returned)}: return the answer as a string, or nothing, which "
            "takes the text of the model's last turn."
        )


class _Command:
    """An agent that is a command. Raises RuntimeError, with the end of its errors, when it fails."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    async def __call__(self, address: AgentAddress, task: dict[str, Any]) -> str | None:
        """Run it to its end; return what it printed, None for nothing."""
        with tempfile.TemporaryDirectory(prefix="rlpipe-agent-") as folder:
            file = Path(folder) / "task.json"
            file.write_text(json.dumps(task, default=str))
            process = await asyncio.create_subprocess_exec(
                *self._words,
                cwd=folder,
                env=os.environ | _variables(address, file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                output, errors = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                await process.wait()
            finally:
                # Also when the caller left: whatever it started ends with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

        if process.returncode:
            raise RuntimeError(
                f"{self._words[0]} ended with status {process.returncode}: {errors.strip()[-_MAX_ERRORS:]}"
            )
        return output.strip() or None


def _variables(address: AgentAddress, task: Path) -> dict[str, str]:
    """Return the environment variables by which clients find the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{address.root_url}/v1",
        "OPENAI_API_KEY": address.api_key,
        "ANTHROPIC_BASE_URL": address.root_url,
        "ANTHROPIC_API_KEY": address.api_key,
        "RLPIPE_TASK": str(task),
    }


async def _read(stream: asyncio.StreamReader | None) -> str:
    """Read a stream to its end, and return its first megabyte as text."""
    assert stream is not None, "a pipe was asked for"
    read = bytearray()
    while chunk := await stream.read(1 << 16):
        read += chunk[: _MAX_OUTPUT - len(read)]
    return read.decode(errors="replace")
