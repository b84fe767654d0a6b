"""The interface of a sandbox: the outcome of a command, and the limit that ended it, if any."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Limit(StrEnum):
    """The limit that a command exceeded."""

    TIME = "timeout"
    OUTPUT = "too much output"
    MEMORY = "out of memory"
    FILES = "too many files"


@dataclass(slots=True, kw_only=True, frozen=True)
class CommandResult:
    """Outcome of one command; a failing command is a result, a failing sandbox is an exception.

    output: stdout and stderr in the order written, UTF-8 with replacement, at most `output_kb`.
    exit_code: exit code of the shell; 128 + n if signal n ended the command.
    exceeded: the limit that ended the command, or None. seconds: wall-clock time, 0 for a cached outcome.
    """

    output: str
    exit_code: int
    exceeded: Limit | None = None
    seconds: float = 0.0


class Sandbox(Protocol):
    """A contained shell on one work tree. Calls block; an episode makes one call at a time."""

    def run(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run a shell command in the work tree, in a new shell each time.

        timeout_s: wall-clock limit; None: the configured limit. stdin: bytes on the command's standard input.
        Raises InfrastructureError if the sandbox fails.
        """
        ...

    def close(self) -> None:
        """Free the sandbox's resources."""
        ...
