"""Runs an agent on one task: a command in the sandbox (`command`), or a function in this process.

Owns the input of a function (base URL, key, task) and its answer. A function runs with the user's rights and
could read its grader. Use it only for trusted code that does not execute what a model writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.agent.command import SandboxedCommand
from rlpipe.envs.base import AgentAddress, named_by
from rlpipe.envs.contract import shown

Program = Callable[[AgentAddress, dict[str, Any]], "str | Awaitable[str | None] | None"]
_NAMES = ("base_url", "api_key", "task", "root_url")


def load_agent(config: EnvConfig, secret: Sequence[Path] = ()) -> Program:
    """Return the agent that `env.agent.run` names. Raises ValueError if it does not exist or cannot run.

    secret: files that a command must not read.
    """
    run = config.agent.run
    where = f"env.agent.run={run!r}"
    if not run.strip():
        raise ValueError(
            "env.agent.run is empty: name a function of (base_url, api_key, task), as in "
            "env.agent.run=my_agent.py:solve, or a command line."
        )
    if config.agent.is_function:
        return _Function(load_function(run, setting="env.agent.run", takes=", ".join(_NAMES[:3])), where)
    return SandboxedCommand(config, secret)


class _Function:
    """An agent that is a Python function and runs in this process."""

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
        """Call the function; return its answer, or an awaitable of the answer if it is async."""
        arguments = {
            "base_url": f"{address.root_url}/v1",
            "api_key": address.api_key,
            "task": task,
            "root_url": address.root_url,
        }
        returned = self._function(**named_by(self._function, **arguments))
        return self._awaited(returned) if inspect.isawaitable(returned) else self._answer(returned)

    async def _awaited(self, returned: Awaitable[Any]) -> str | None:
        return self._answer(await returned)

    def _answer(self, returned: object) -> str | None:
        if returned is None or isinstance(returned, str):
            return returned
        raise ValueError(
            f"{self._where} returned {shown(returned)}: return the answer as a string, or nothing, which "
            "takes the text of the model's last turn."
        )
