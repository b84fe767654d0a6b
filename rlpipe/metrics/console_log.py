"""The console of a run as a file: `console.log`, one plain line per step or event, each with its time.

Every start of a run appends to it. Events that the console does not show are in `events.jsonl`.
"""

from __future__ import annotations

import time
from io import TextIOBase
from pathlib import Path
from typing import IO

from rlpipe.metrics.console import ConsoleSink, Header

NAME = "console.log"


class ConsoleLog(ConsoleSink):
    """Appends the plain console lines of a run to a file."""

    name = NAME

    def __init__(self, header: Header, path: Path) -> None:
        super().__init__(header)
        self._path = path

    def open(self) -> None:
        """Open the file and write the description of the run."""
        from rich.console import Console

        self._file = self._path.open("a", encoding="utf-8")
        self._console = Console(file=_Stamped(self._file), force_terminal=False, highlight=False)  # type: ignore[arg-type]
        super().open()

    def close(self) -> None:
        """Write the outcome and close the file."""
        super().close()
        self._file.close()


class _Stamped(TextIOBase):
    """A text file in which each line begins with its time."""

    encoding = "ascii"

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return self._file.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def flush(self) -> None:
        self._file.flush()
