"""The command `rlpipe`: `rlpipe run +recipe=swe_rl`, `rlpipe report RUN`, `rlpipe runs`, and so on.

Each is a module that `python -m` runs as well; what follows the word is that module's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

MODULES = {
    "run": "rlpipe.cli.run",
    "report": "rlpipe.report.__main__",
    "analyse": "rlpipe.diagnosis.analysis",
    "check": "rlpipe.cli.check",
    "doctor": "rlpipe.cli.doctor",
}
USAGE = """usage: rlpipe COMMAND ...

  run +recipe=NAME [key=value ...]   run a recipe (rlpipe run lists them)
  check +recipe=NAME [key=value ...] the same without starting it; plays an environment of your own
  report RUN [RUN ...]               write the HTML report of a run, or comparing several
  runs [DIR]                         a table of the run directories below DIR (runs)
  analyse RUN [RUN ...]              the summary of a run in text (--json: acceptance, cut every way)
  doctor [--json] [+recipe=NAME ...] what this machine lacks, with remedies; whether a run would start"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if given else 2
    command, rest = given[0], given[1:]
    if command in _OWN:
        try:
            return _OWN[command](rest)
        except ValueError as error:
            print(f"rlpipe: {error}", file=sys.stderr)
            return 2
    if command not in MODULES:
        print(f"rlpipe: there is no command {command!r}.\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv = [f"rlpipe {command}", *rest]
    return int(import_module(MODULES[command]).main() or 0)


def _runs(arguments: Sequence[str]) -> int:
    from rlpipe.report.table import run_directories, runs_table

    root = Path(arguments[0] if arguments else "runs")
    if not (directories := run_directories(root)):
        print(f"rlpipe: no run directory at or below {str(root)!r}: rlpipe runs DIR.", file=sys.stderr)
        return 2
    print(runs_table(directories))
    return 0


_OWN = {"runs": _runs}


if __name__ == "__main__":
    sys.exit(main())
