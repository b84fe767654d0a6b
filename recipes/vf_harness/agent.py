"""Runs the `null` harness of verifiers on one task. Its chat program runs in this process.

`NullHarness.launch` prepares its program and runs it; the runtime here runs it in the event loop. The harness
executes nothing that a model writes, so it needs no sandbox.
"""

from __future__ import annotations

import contextvars
import sys
import traceback
from types import SimpleNamespace
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.task import TaskData

_arguments: contextvars.ContextVar[list[str]] = contextvars.ContextVar("arguments")
_programs: dict[str, dict[str, Any]] = {}
_harness = NullHarness(NullHarnessConfig(id="null"))


class InProcess:
    """A runtime of verifiers that has only what a chat program needs."""

    async def prepare_uv_script(self, source: str, env: dict[str, str], activate: bool = True) -> list[str]:
        """Load a program, but only once; return the beginning of its command line."""
        if source not in _programs:
            program = _programs[source] = {"__name__": "chat_program"}
            exec(compile(source, "chat_program.py", "exec"), program)
            parse = program["parse_args"]
            program["parse_args"] = lambda: _parsed(parse)
        return [source]

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program to its end."""
        source, *arguments = argv
        _arguments.set(["chat_program.py", *arguments])
        try:
            await _programs[source]["main"]()
        except (Exception, SystemExit):
            return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _parsed(parse: Any) -> Any:
    """Parse the command line of one program; several programs run at once."""
    before, sys.argv = sys.argv, _arguments.get()
    try:
        return parse()
    finally:
        sys.argv = before


async def solve(base_url: str, api_key: str, task: dict[str, Any]) -> None:
    """Have the harness work on a task; the model's last turn is the answer."""
    context = ModelContext(model="policy", client=None)  # the harness needs only its name
    data = TaskData(prompt=task["prompt"])
    trace = SimpleNamespace(id=task["id"].replace("/", "-"))
    result = await _harness.launch(context, trace, InProcess(), base_url, api_key, {}, data)
    if result.exit_code:
        raise RuntimeError(f"the harness ended with status {result.exit_code}: {result.stderr[-2000:]}")
