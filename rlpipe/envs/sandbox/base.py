"""The contract of a sandbox: the outcome of a command, and which limit ended it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Limit(StrEnum):
    """A limit for which a command was ended."""

    TIME = "timeout"
    OUTPUT = "too much output"
    MEMORY = "out of memory"
    FILES = "too many files"


@dataclass(slots=True, kw_only=True, frozen=True)
class CommandResult:
    """Outcome of one command; a failing command is a result, a failing sandbox is an exception.

    output: stdout and stderr in the order written, UTF-8 with replacement, at most `output_kb`.
    exit_code: of the shell; 128 + n when signal n ended the command.
    exceeded: the limit it was ended for, or None. seconds: wall-clock, 0 for a reused outcome.
    """

    output: str
    exit_code: int
    exceeded: Limit | None = None
    seconds: float = 0.0


class Sandbox(Protocol):
    """A contained shell over one work tree. Calls block; an episode makes them one at a time."""

    def run(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run a shell command in the work tree; a new shell each time.

        timeout_s: wall-clock limit, the configured one when None. stdin: what the command may read.
        Raises InfrastructureError when the sandbox itself failed.
        """
        ...

    def close(self) -> None:
        """Free what the sandbox holds."""
        ...
